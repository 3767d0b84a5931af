"""Values only: a profile, what it predicts, and their JSON. Nothing here measures."""
