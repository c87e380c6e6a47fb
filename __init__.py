"""nopad: no padding in training, no padding in evaluation.

Import from the rooms: `nopad.packing`, `nopad.collators`, `nopad.attention`, `nopad.trainer`,
`nopad.inference`. Nothing heavy is loaded here.
"""

__version__ = "0.1.0"
