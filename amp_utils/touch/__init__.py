"""Figures to touch: drawings with controls, in the notebook, its page and its slides alike.

A figure `name` is two files and a line here. `name.py` has the function that a lesson calls: it
turns what the lesson measured into plain data and a drawing that stands still, and hands both to
`frame.show`. `name.js` has pure functions for the arithmetic, which the tests compare with
Python's, and `figure(stage, data)`, which puts controls into the stage and returns `draw(width)`.
What `stage`, `make`, `slider`, `choice` and `button` do stands in `frame.js`, the looks in
`frame.css`. The rest is the frame's: theme, width, focus, the result in words (`stage.say`).
Without JavaScript, or where JupyterLab does not trust the notebook, the still drawing is seen.
"""

from amp_utils.touch.bits import bits
from amp_utils.touch.flight import flight
from amp_utils.touch.flow import flow
from amp_utils.touch.ladder import ladder
from amp_utils.touch.loss_scale import loss_scale
from amp_utils.touch.timeline import timeline
from amp_utils.touch.updates import updates

__all__ = ["bits", "flight", "flow", "ladder", "loss_scale", "timeline", "updates"]
