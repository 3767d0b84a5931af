"""State in Python that a module reads and changes: attributes, containers, globals, random generators.

A module that runs again must see this state as its first run did, and must leave it as the first run did.
`places` copies one piece of state and puts it back, `search` finds the pieces of a module, and `watch` takes
a snapshot of them for each run.
"""
