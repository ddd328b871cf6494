"""A function of PyTorch whose forward and backward are chosen freely, for faults that are planted in between."""

import torch


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, change, back):
        ctx.back = back
        return change(x)

    @staticmethod
    def backward(ctx, dx):
        return ctx.back(dx), None, None


def passing(x, change=torch.clone, back=torch.clone):
    """change(x), whose gradient goes back as back(gradient). Neither may return its own argument."""
    return _Pass.apply(x, change, back)


def tf32(x):
    """Round float32 to TF32's ten mantissa bits; float32's range stays."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
