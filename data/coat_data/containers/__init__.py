"""One module per storage format; each returns raw rows by number and in order."""
