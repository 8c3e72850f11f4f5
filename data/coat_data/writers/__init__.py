"""One module per format that samples are exported to; each row is read back before it is kept."""
