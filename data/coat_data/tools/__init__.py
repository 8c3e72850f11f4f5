"""Implementation of the commands ``coat-vlm data``: ingest, lint, preview, export."""
