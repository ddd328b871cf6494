"""What a JupyterLab of the tests is told to start its kernels with, where each would import torch anew."""

from jupyter_server.services.kernels.kernelmanager import ServerKernelManager

from tests.notebooks.forked import Forks


class ForkedServerKernels(Forks, ServerKernelManager):
    """Forks of one process: see tests/notebooks/forked.py."""
