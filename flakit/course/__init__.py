"""What lessons ask of a learner, and what a learner keeps: checks, questions, a file of one's own, progress.

    from flakit.course import check, fitting, mine, predict, progress, returning

A building exercise ends so, in the cell that checks it:

    mine.add(step, check("the last state", S, expected))    # right: `step` now stands in mine.py, beside the notebooks

and a later lesson begins so, whether or not the reader has been through the ones before:

    step = mine.take("step")    # the learner's, else that of the solutions, and it says which
    mine.show()                 # the file, as the last line of a cell
    progress()                  # which checks were right, lesson by lesson, and what comes next
    progress().fingerprint()    # the faults of lessons that are done
"""

from . import mine
from .exercises import check, fitting, predict, returning
from .record import progress

__all__ = ["check", "fitting", "mine", "predict", "progress", "returning"]
