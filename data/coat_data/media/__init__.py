"""Images and videos: opening, sampling, tiling, fetching."""
