"""Other tools' measurements: read, recognised, cross-checked, turned into records of ours, and written back.

A reader turns text into rows and knows nothing of files; what rows show is said once, for all readers.
"""
