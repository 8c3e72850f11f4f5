"""Lists of sources in several formats; all are read as entries of a recipe's ``data``."""
