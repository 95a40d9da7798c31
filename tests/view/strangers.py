"""A recording from a stranger: everything in it that is text tries to break out of where it is put."""

from __future__ import annotations

from itertools import count

import numpy as np

from flashviz import Recorder
from flashviz.events import Source
from flashviz.recording import Recording

EVIL = (
    "\"><script>window.hacked='{n}'</script>",
    "'><img src=x onerror=\"window.hacked='{n}'\">",
    "</style><script>window.hacked='{n}'</script><style>",
    "</title></svg><svg onload=\"window.hacked='{n}'\">",
    "]]><script>window.hacked='{n}'</script><![CDATA[",
    "--><script>window.hacked='{n}'</script><!--",
    "</script><script>window.hacked='{n}'</script>",
    "</option></select></textarea></pre><iframe srcdoc=\"<script>parent.hacked='{n}'</script>\">",
    '" onmouseover="window.hacked=\'{n}\'" onfocus="window.hacked=\'{n}\'" autofocus x="',
    "' onclick='window.hacked={n}' onanimationstart='window.hacked={n}' y='",
    "javascript:window.hacked='{n}'",
    "{{}}*{{background:url(javascript:window.hacked={n})}}@import 'data:text/css,x';",
    "&lt;script&gt;window.hacked={n}&lt;/script&gt; &amp;quot; &#60;script&#62;",
    "${{window.hacked={n}}} `${{window.hacked={n}}}` \\u003cscript\\u003e @NAME@ \x00\x1b\u2028\ufffe {n}",
)


def evil() -> Recording:
    """A recording whose every name, label, caption and source is one of :data:`EVIL`, numbered."""
    numbers = count()

    def text(kind: int) -> str:
        return EVIL[kind % len(EVIL)].format(n=next(numbers))

    kinds = len(EVIL)
    r = Recorder(text(0))
    tensors = [r.tensor(text(k), np.ones((2, 2)), tile=1) for k in range(0, kinds, 3)]
    slots = [
        r.slot(text(k), (2, 2), memory="shared" if k % 3 else text(k), tensor="S" if k == 4 else text(k))
        for k in range(kinds)
    ]
    actions = [text(k) for k in range(kinds)]
    r.launch(text(1), (3, 1, 1))
    for block in range(2):
        r.block(block)
        for k in range(kinds):
            with r.step(text(k), text(k + 1), action=actions[k], tiles={text(k + 2): k}):
                r.move(tensors[k % len(tensors)][0], slots[k])
                r.change(slots[k], np.full((2, 2), np.nan), cells=True)
                r.stale(slots[k])
    body = "\n".join(text(k) for k in range(kinds))
    lines = tuple((action, n + 1, n + 1) for n, action in enumerate(actions))
    code = [Source(language, text(k), body, lines) for k, language in enumerate(("python", "cuda", text(3)))]
    return r.recording(code)
