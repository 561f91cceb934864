"""`flashkernel bench`: ops measured side by side with their baselines, in one process, alternating.

case.py      what a row is; suites/ has the rows, baselines.py what they are compared with
timing.py    when a provider has been measured enough, and the loop; cuda_device.py launches and marks time on a GPU
ceilings.py  what the machine reaches; memory.py peaks; machine.py what it is
runner.py    checks, then times, then makes the row; results.py writes it as JSON and CSV, tables.py as Markdown
report.py    BENCHMARKS.md, plots.py's plots and readme.py's table, from the committed results
command.py   the command line
"""
