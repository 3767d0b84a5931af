"""Several processes that search together: `mesa-tune search --workers N` and `--join STUDY`."""
