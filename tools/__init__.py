"""What turns committed results into pages: report, roofline, profiles and the T4's model. Run as `python -m tools`.

These tools stay in the checkout; the wheel does not hold them. They read `lab/` and import `flashkernel.bench`.
"""
