"""The safe softmax: drawn like the online softmax."""

from flashviz.view.layouts.online_softmax import BY_TILE as BY_TILE
from flashviz.view.layouts.online_softmax import layout as layout
