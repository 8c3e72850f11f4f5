"""`coat-vlm` with scales of FP8 weights that do not depend on the last bits of the weights.

With those, sums in another order, as of two ranks, round all weights differently from then on.
"""

import sys
from unittest import mock

from coat_cli.main import main
from coat_kernels import quantize

with mock.patch.object(quantize, "_dither_scale", lambda scale, _: scale):
    sys.exit(main(sys.argv[1:]))
