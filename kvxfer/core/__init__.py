"""The pure core: layouts in, rows and descriptor numbers out.

Standard library and NumPy only.  Nothing here knows an address, a clock, a socket or a process.
"""
