"""Instruments and lesson plumbing for the course *Mixed Precision, Hands On*.

The lessons themselves are in ``notebooks/``; what stands here looks at them. Import the room you need,
for example ``from amp_utils import formats``: nothing is loaded before you ask for it.
"""
