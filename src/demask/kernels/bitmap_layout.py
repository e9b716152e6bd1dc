"""How a matrix with zeros is stored as a bitmap and its nonzeros.

A bit for each element, and the nonzeros of two rows in turns, eight columns at a time:

    bits    row 0, columns 0 to 7 | row 1, columns 0 to 7 | row 0, columns 8 to 15 | ...      one byte each
    values  the nonzeros of row 0, columns 0 to 7; of row 1, columns 0 to 7; ...

Column k of eight is bit k. Columns are padded to a multiple of `STEP`, rows to an even number.
"""

BITS = 8  # columns per byte
STEP = 32  # columns that kernels read at a time
SLACK = 64  # elements after the values, which may be read


def padded_columns(columns: int) -> int:
    """The number of columns of a bitmap."""
    return -(-columns // STEP) * STEP
