"""Where a program works: the rows of its sequence, chunk or part, and the indices of what it stores.

Sequences are B rows of T tokens, or N packed ones, laid end to end with offsets cu_seqlens [N + 1]. Each is cut into
chunks of C tokens, the last of which may be shorter, and a *part* is a run of L chunks that one program walks. Layouts
of packed sequences (`packed_triton.Pieces`) give, for chunks as for parts, the sequence of each and the number of them
before each sequence, `…_before` [N + 1]; unless PACKED they are None. Unused chunks and parts of a packed batch start
past the end of their sequence and have no rows.
"""

import triton
import triton.language as tl


@triton.jit
def rows_of(i_n, cu_seqlens, T, PACKED: tl.constexpr):
    """Return the first row and the end of sequence i_n among all rows, of a batch or of packed sequences."""
    if PACKED:
        begin = tl.load(cu_seqlens + i_n).to(tl.int64)
        end = tl.minimum(tl.load(cu_seqlens + i_n + 1).to(tl.int64), T)
    else:
        begin = i_n.to(tl.int64) * T
        end = begin + T
    return begin, end


@triton.jit
def pieces_of(i_n, before, count, PACKED: tl.constexpr):
    """Return the first of sequence i_n's chunks or parts and their number: `count` or, PACKED, from before [N + 1]."""
    if PACKED:
        first = tl.load(before + i_n)
        count = tl.load(before + i_n + 1) - first
    else:
        first = i_n * count
    return first, count


@triton.jit
def locate_sequence(i_n, cu_seqlens, checkpoints_before, T, C: tl.constexpr, PACKED: tl.constexpr):
    """Return the first row and the end of sequence i_n, and the index of its first checkpoint, one every C tokens."""
    begin, end = rows_of(i_n, cu_seqlens, T, PACKED)
    if PACKED:
        first = tl.load(checkpoints_before + i_n).to(tl.int64)
    else:
        first = i_n.to(tl.int64) * tl.cdiv(T, C)
    return begin, end, first


@triton.jit
def locate_chunk(i_c, sequence_of_chunk, cu_seqlens, chunks_before, T, C: tl.constexpr, PACKED: tl.constexpr):
    """Return the first row of chunk i_c and the end of its sequence."""
    if PACKED:
        i_n = tl.load(sequence_of_chunk + i_c)
        start = tl.load(cu_seqlens + i_n).to(tl.int64) + (i_c - tl.load(chunks_before + i_n)) * C
        end = tl.minimum(tl.load(cu_seqlens + i_n + 1).to(tl.int64), T)
    else:
        NT = tl.cdiv(T, C)
        first = (i_c // NT).to(tl.int64) * T
        start = first + (i_c % NT) * C
        end = first + T
    return start, end


@triton.jit
def locate_part(i_p, sequence_of_part, parts_before, cu_seqlens, chunks_before, T, L, C: tl.constexpr,
                IN_PARTS: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """Return the first row of part i_p, the end of its sequence, its first chunk and its number of chunks.

    IN_PARTS: packed sequences are cut; otherwise a part is a whole sequence.
    """
    if PACKED:
        if IN_PARTS:
            i_n = tl.load(sequence_of_part + i_p)
            skipped = (i_p - tl.load(parts_before + i_n)) * L
        else:
            i_n = i_p
            skipped = i_p * 0
        begin = tl.load(cu_seqlens + i_n).to(tl.int64) + skipped * C
        end = tl.minimum(tl.load(cu_seqlens + i_n + 1).to(tl.int64), T)
        first_chunk = tl.load(chunks_before + i_n) + skipped
    else:
        NT = tl.cdiv(T, C)
        NP = tl.cdiv(NT, L)
        i_n = i_p // NP
        skipped = (i_p % NP) * L
        begin = i_n.to(tl.int64) * T + skipped * C
        end = (i_n + 1).to(tl.int64) * T
        first_chunk = i_n * NT + skipped
    chunks = tl.minimum(tl.maximum(end - begin + C - 1, 0) // C, L).to(tl.int32)
    return begin, end, first_chunk, chunks


@triton.jit
def locate_program(T, sequence_of_part, parts_before, cu_seqlens, chunks_before, L, H: tl.constexpr, C: tl.constexpr,
                   PACKED: tl.constexpr, program=None):  # fmt: skip
    """Return this program's part of L chunks (`bands_triton.Parts.where`), its sequence and its head; the part's first
    row and the end of the sequence; its first chunk and number of chunks; whether it is the sequence's first, and its
    last. program: another program's index, to return its place."""
    if program is None:
        program = tl.program_id(0)
    i_p, i_h = program // H, program % H
    if PACKED:
        i_n = tl.load(sequence_of_part + i_p)
        begin, end = rows_of(i_n, cu_seqlens, T, PACKED)
        chunks = tl.cdiv(end - begin, C).to(tl.int32)
        skipped = (i_p - tl.load(parts_before + i_n)) * L
        first_chunk = tl.load(chunks_before + i_n)
    else:
        chunks = tl.cdiv(T, C)
        parts = tl.cdiv(chunks, L)
        i_n, skipped = i_p // parts, i_p % parts * L
        begin, end = rows_of(i_n, cu_seqlens, T, PACKED)
        first_chunk = i_n * chunks
    # Unused parts have no chunks. A sequence without tokens has one part, of no chunks.
    count = tl.maximum(tl.minimum(chunks - skipped, L), 0)
    is_last = (skipped + L >= chunks) & ((count > 0) | (skipped == 0))
    return i_p, i_n, i_h, begin + skipped * C, end, first_chunk + skipped, count, skipped == 0, is_last
