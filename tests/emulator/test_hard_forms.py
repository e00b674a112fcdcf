"""Which of the forms that few kernels use load, and that the others are refused in words."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from warpcheck import Machine, Unsupported

from .hard_forms import hard_forms

FORMS = hard_forms()


@pytest.mark.parametrize("chapter", FORMS)
def test_a_form_loads_or_is_refused_by_name(chapter: str) -> None:
    for form in FORMS[chapter]:
        if form.is_refused:
            with pytest.raises(Unsupported, match=rf"PTX line \d+: .*{re.escape(form.name)}'"):
                Machine().load(form.module)
        else:
            Machine().load(form.module)


def test_no_form_is_listed_twice() -> None:
    counts = Counter(form.name for forms in FORMS.values() for form in forms)
    assert counts.most_common(1)[0][1] == 1
