"""Makers of data sets: generated scenes, and downloads from the Hub."""
