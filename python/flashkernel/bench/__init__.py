"""`flashkernel bench`: ops measured side by side with torch, in one process, alternating.

cases.py says what is run, baselines.py what it is compared with, timing.py how it is timed, report.py what is printed.
"""
