"""Which chat templates may be rendered where a short request is read."""

from datetime import datetime
from pathlib import Path

import pytest

from soloist.model.folder import shipped_folder
from soloist.text.bounded import is_bounded
from soloist.text.chat import ChatTemplate
from soloist.text.jinja import environment

MADE = environment(datetime.now)
TEMPLATES = Path(__file__).with_name("templates")


@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3"])
def test_templates_of_families_are(family) -> None:
    assert is_bounded(MADE, (TEMPLATES / f"{family}.jinja").read_text("utf-8"))


def test_the_template_of_shipped_models_is() -> None:
    assert ChatTemplate.from_folder(shipped_folder("etude")).is_bounded


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(9) %}{% endfor %}",
        "{% for m in messages %}{% for n in messages %}{% endfor %}{% endfor %}",
        "{% for m in messages %}{% for n in m %}{% for o in m %}{% endfor %}{% endfor %}"
        "{% endfor %}",
        "{% for m in messages %}{% set m = messages %}{% for n in m %}{% endfor %}{% endfor %}",
        "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{% for m in messages %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% for m in messages %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% for m in messages %}{% set ns.x = ns.x | replace('a', 'aa') %}{% endfor %}",
        "{% for m in messages %}{% set ns.x = [ns.x, 1] %}{% endfor %}",
        "{% for m in messages %}{% set x %}{{ m }}{{ m }}{% endset %}{% endfor %}",
        "{{ 'a' * 10**10 }}", "{{ n * 'a' }}", "{{ 9 ** 9 ** 9 }}", "{{ 9 // 2 }}",
        "{{ '%99999999d' % 1 }}", "{{ content % 1 }}", "{{ 'a' | center(99999999) }}",
        "{{ x | tojson(indent=99999999) }}", "{{ x | tojson(99999999) }}", "{{ x | indent(n) }}",
        "{{ 'a'.ljust(99999999) }}", "{{ 'a'.replace('a', x) }}", "{{ ','.join(x) }}",
        "{{ x | replace('a', 'aaaaaaaaaa') }}", "{{ x | replace('', 'a') }}",
        "{{ x | replace('a', 'bb') | replace('b', 'cc') | replace('c', 'dd') }}",
        "{{ x | replace(y, z) }}", "{{ x | map('upper') | list }}", "{{ lipsum(9) }}",
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
        "{% set raise_exception = messages %}", "{% include 'x' %}", "{{ dict(a=1) }}", "{% if %}",
        "{{ x.y.__class__() }}", "{{ x[0]() }}", "{{ 'x' }}" * 20_000,
    ],
)  # fmt: skip
def test_what_may_take_more_is_not(source) -> None:
    assert not is_bounded(MADE, source)
