"""Makers of data sets: generated scenes, CIFAR-10, NLVR, and downloads from the Hub."""
