"""The figures by their number in the paper."""

from .base import Figure
from .figure_05 import FIGURE as FIGURE_05
from .figure_06 import FIGURE as FIGURE_06
from .figure_08 import FIGURE as FIGURE_08
from .figure_09 import FIGURE as FIGURE_09
from .figure_10 import FIGURE as FIGURE_10
from .figure_11 import FIGURE as FIGURE_11
from .figure_12 import FIGURE as FIGURE_12
from .table_facts import FIGURE as FACTS

_ALL = (FIGURE_05, FIGURE_06, FIGURE_08, FIGURE_09, FIGURE_10, FIGURE_11, FIGURE_12, FACTS)
FIGURES: dict[str, Figure] = {figure.number: figure for figure in _ALL}
