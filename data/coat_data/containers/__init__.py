"""One module per way of storing rows; each gives raw rows by number and in order."""
