"""What a model has and keeps: looked at, put back after a recording, and written down when a call changes it."""
