"""Run folders: their files, from what and how each was made."""
