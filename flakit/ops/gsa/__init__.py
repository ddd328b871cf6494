"""GSA (gated slot attention): a memory of slots that fade, read twice with a softmax in between."""
