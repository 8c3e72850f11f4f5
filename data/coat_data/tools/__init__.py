"""Implementation of the commands ``coat-vlm data``: ingest, lint, stats, preview, export."""
