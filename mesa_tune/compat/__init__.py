"""The public names of Mesa, ActNN, GACT and DropIT: their users only change an import."""
