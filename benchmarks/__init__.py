"""What the performance page shows: ``python -m benchmarks`` (``make bench``) measures, prints and plots it.

A section is a module with a title and a function that measures; each runs in a process of its own, since a transport is
chosen by the environment that UCX reads once.  What counts are ratios of things measured in turn in one process: a
machine that speeds up or slows down changes both.
"""
