"""Evaluation: generate predictions for questions, save them, and score the saved file."""
