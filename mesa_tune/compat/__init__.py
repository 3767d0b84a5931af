"""The public names of Mesa, ActNN, GACT and DropIT, over our functions: their users change one import."""
