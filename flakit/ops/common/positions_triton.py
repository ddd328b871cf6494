"""Where a program works: the rows of its sequence, chunk or part, and the indices of what it stores.

Sequences are B rows of T tokens, or N packed ones, laid end to end with offsets cu_seqlens [N + 1]. Each is cut into
chunks of C tokens, the last of which may be shorter. A *part* is a run of L chunks that one program walks. For packed
sequences, `packed_triton.Pieces` lists the sequence of each chunk, `sequence_of_chunk` [chunks], and the number of
chunks before each sequence, `chunks_before` [N + 1]; likewise for parts. Unless PACKED, these arguments are None.
Unused chunks and parts of a packed batch start past the end of their sequence and have no rows.
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
def place_of(i_p, sequence_of_part, parts_before, T, L, C: tl.constexpr, PACKED: tl.constexpr):
    """Return the sequence of part i_p, of L chunks, and the number of that sequence's chunks before the part."""
    if PACKED:
        i_n = tl.load(sequence_of_part + i_p)
        skipped = (i_p - tl.load(parts_before + i_n)) * L
    else:
        parts = tl.cdiv(tl.cdiv(T, C), L)
        i_n, skipped = i_p // parts, i_p % parts * L
    return i_n, skipped


@triton.jit
def locate_sequence(i_n, cu_seqlens, checkpoints_before, T, C: tl.constexpr, PACKED: tl.constexpr):
    """Return the first row and the end of sequence i_n, and the index of its first checkpoint, one every C tokens."""
    begin, end = rows_of(i_n, cu_seqlens, T, PACKED)
    first, _ = pieces_of(i_n.to(tl.int64), checkpoints_before, tl.cdiv(T, C), PACKED)
    return begin, end, first.to(tl.int64)


@triton.jit
def locate_chunk(i_c, sequence_of_chunk, cu_seqlens, chunks_before, T, C: tl.constexpr, PACKED: tl.constexpr):
    """Return the first row of chunk i_c and the end of its sequence."""
    i_n, skipped = place_of(i_c, sequence_of_chunk, chunks_before, T, 1, C, PACKED)
    begin, end = rows_of(i_n, cu_seqlens, T, PACKED)
    return begin + skipped * C, end


@triton.jit
def locate_part(i_p, sequence_of_part, parts_before, cu_seqlens, chunks_before, T, L, C: tl.constexpr,
                IN_PARTS: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """Return the first row of part i_p, the end of its sequence, its first chunk and its number of chunks.

    IN_PARTS: packed sequences are cut; otherwise a part is a whole sequence.
    """
    if PACKED and not IN_PARTS:
        i_n, skipped = i_p, i_p * 0
    else:
        i_n, skipped = place_of(i_p, sequence_of_part, parts_before, T, L, C, PACKED)
    begin, end = rows_of(i_n, cu_seqlens, T, PACKED)
    begin += skipped * C
    first_chunk, _ = pieces_of(i_n, chunks_before, tl.cdiv(T, C), PACKED)
    chunks = tl.minimum(tl.maximum(end - begin + C - 1, 0) // C, L).to(tl.int32)
    return begin, end, first_chunk + skipped, chunks


@triton.jit
def locate_program(T, sequence_of_part, parts_before, cu_seqlens, chunks_before, L, H: tl.constexpr, C: tl.constexpr,
                   PACKED: tl.constexpr, program=None):  # fmt: skip
    """Return this program's part of L chunks (`bands_triton.Parts.where`), its sequence and its head; the part's first
    row and the end of the sequence; its first chunk and number of chunks; whether it is the sequence's first, and its
    last. program: another program's index, to return its place."""
    if program is None:
        program = tl.program_id(0)
    i_p, i_h = program // H, program % H
    i_n, skipped = place_of(i_p, sequence_of_part, parts_before, T, L, C, PACKED)
    begin, end = rows_of(i_n, cu_seqlens, T, PACKED)
    chunks = tl.cdiv(end - begin, C).to(tl.int32) if PACKED else tl.cdiv(T, C)
    first_chunk, _ = pieces_of(i_n, chunks_before, chunks, PACKED)
    # Unused parts have no chunks. A sequence without tokens has one part, of no chunks.
    count = tl.maximum(tl.minimum(chunks - skipped, L), 0)
    is_last = (skipped + L >= chunks) & ((count > 0) | (skipped == 0))
    return i_p, i_n, i_h, begin + skipped * C, end, first_chunk + skipped, count, skipped == 0, is_last
