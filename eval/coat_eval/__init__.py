"""Evaluation: generate predictions for questions, save them, and score the saved file.

Scoring (``report``, ``tasks``) imports neither torch nor transformers; ``runner`` imports both.
"""
