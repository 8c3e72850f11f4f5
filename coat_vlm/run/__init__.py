"""What keeps a run whole: its lock, signals, and the life of its processes."""
