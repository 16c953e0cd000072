"""Memory that an engine and its sidecar share: handles, and what it takes to map them.

``handles`` is pure data and may be imported by clients; ``api`` opens a handle under a policy.  One module per kind of
handle does the opening.
"""
