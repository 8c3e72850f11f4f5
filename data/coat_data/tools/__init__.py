"""What the commands do with data: ingest, lint, stats, preview, export."""
