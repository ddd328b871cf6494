"""Exercises of the lessons: checks, questions, the learner's own file `mine.py`, and progress.

    from flakit.course import check, fitting, mine, predict, progress, returning

An exercise that builds a function ends in the cell that checks it with

    mine.add(step, check("the last state", S, expected))    # if right, copies `step` to mine.py beside the notebooks

and a later lesson begins as follows, whether or not the learner has done the earlier ones:

    step = mine.take("step")    # the learner's function, or else that of the solutions; prints which
    mine.show()                 # the file, as the last line of a cell
    progress()                  # the checks answered correctly, by lesson, and the next one
    progress().fingerprint()    # the faults of completed lessons
"""

from . import mine
from .exercises import check, fitting, predict, returning
from .record import progress

__all__ = ["check", "fitting", "mine", "predict", "progress", "returning"]
