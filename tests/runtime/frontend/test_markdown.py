"""Answers as the chat page shows them, in a browser: Markdown, code and math become nodes, and nothing else does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.frontend.chromium import Page
from support.frontend.scripted import ScriptedStack

_SAMPLE = """\
# Title

Some *text* with `code`, a [link](https://a.example/b "t") and $x^2$
on two lines.

1. one
   - nested

2. two

   with a paragraph
3. three
| a | b |
|--:|---|
| 1 | 2 |

> quoted
> - list

```python
def f():
    \"\"\"Two
    lines.\"\"\"
    return 1  # done
```

$$
\\frac{a}{b}
$$

- [x] done
- [ ] not done

2
=== not a heading

The end
---
"""


@pytest.fixture(scope="module")
def page(browser: Page, shared_scripted: ScriptedStack) -> Page:
    """The chat page, of which these tests use the renderer alone."""
    browser.open(f"{shared_scripted.url}/")
    return browser


def _show(page: Page, *texts: str) -> str:
    """Return the markup of a view that shows the texts one after the other."""
    markup: str = page.evaluate(
        "import('/static/markdown/view.js').then(({ MarkdownView }) => {"
        "const node = document.createElement('div'), view = new MarkdownView(node);"
        f"for (const text of {json.dumps(texts)}) view.update(text); return node.innerHTML; }})"
    )
    return markup


@pytest.mark.parametrize(
    ("text", "markup"),
    [
        ("a\nb", "<p>a<br>b</p>"),
        ("## A #\n\nb", '<h4 class="level-2">A</h4><p>b</p>'),
        ("A\n===", '<h3 class="level-1">A</h3>'),
        (
            "**a *b* c** ~~d~~ ***e***",
            "<p><strong>a <em>b</em> c</strong> <del>d</del> <em><strong>e</strong></em></p>",
        ),
        ("snake_case_name 2 * 3 * 4 **open", "<p>snake_case_name 2 * 3 * 4 **open</p>"),
        (r"\*not\* `a*b*` ``a`b``", "<p>*not* <code>a*b*</code> <code>a`b</code></p>"),
        ("- a\n  - b\n- c", "<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>"),
        ("1. a\n    - b\n2. c", "<ol><li>a<ul><li>b</li></ul></li><li>c</li></ol>"),
        ("3. a\n\n4. b", '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol>'),
        ("a\n2. b", "<p>a<br>2. b</p>"),
        ("> a\nb\n\nc", "<blockquote><p>a<br>b</p></blockquote><p>c</p>"),
        ("a\n\n* * *\n\nb", "<p>a</p><hr><p>b</p>"),
        ("a &amp; b &lt;", "<p>a &amp; b &lt;</p>"),
        ("It costs $5 and $10.", "<p>It costs $5 and $10.</p>"),
        ("[a](javascript:b) ![c](d.png)", '<p><span title="javascript:b">a</span> <span title="d.png">c</span></p>'),
        ("[not a link] (b)", "<p>[not a link] (b)</p>"),
    ],
)
def test_markdown_becomes_nodes(page: Page, text: str, markup: str) -> None:
    assert _show(page, text) == markup


def test_a_table_has_aligned_cells_with_emphasis_and_line_breaks(page: Page) -> None:
    markup = _show(page, "| a | b |\n|:-:|--:|\n| **1** | 2\\|3<br>4 |\n| 5 |\n\nafter")
    assert '<thead><tr><th class="center">a</th><th class="right">b</th></tr></thead>' in markup
    assert '<td class="center"><strong>1</strong></td><td class="right">2|3<br>4</td>' in markup
    assert '<td class="center">5</td><td class="right"></td>' in markup
    assert markup.endswith("<p>after</p>")


def test_a_table_grows_with_its_text_and_not_with_its_square(page: Page) -> None:
    wide = "|" + "a|" * 700
    markup = _show(page, "\n".join([wide, "|" + "-|" * 700, wide, *["|"] * 700]))
    assert markup.count("<tr>") == 702
    assert markup.count(">a</td>") == 700
    assert markup.count("<td") < 10_000


def test_links_are_addresses_of_the_web_and_of_mail(page: Page) -> None:
    markup = _show(page, "[a](https://a.example/(b)) <mailto:c@d.example>\n(see https://e.example/f).")
    link = '<a href="{0}" title="{0}" target="_blank" rel="noopener noreferrer">{1}</a>'
    assert link.format("https://a.example/(b)", "a") in markup
    assert link.format("mailto:c@d.example", "mailto:c@d.example") in markup
    assert f"(see {link.format('https://e.example/f', 'https://e.example/f')})." in markup
    markup = _show(page, "https://a.example/b_(c))).' https://d.example/e...f")
    assert f"{link.format('https://a.example/b_(c)', 'https://a.example/b_(c)')})).' " in markup
    assert link.format("https://d.example/e...f", "https://d.example/e...f") in markup


@pytest.mark.parametrize(
    "text",
    [
        "<img src=x onerror=alert(1)>",
        "<script>alert(1)</script>",
        "<a href='javascript:alert(1)'>a</a>",
        "[a](javascript:alert(1))",
        "[a](JaVaScRiPt:alert(1))",
        "[a](java\tscript:alert(1))",
        "[a](&#106;avascript:alert(1))",
        "[a](data:text/html,<script>alert(1)</script>)",
        "[a](vbscript:alert(1)) [b](file:///etc/passwd) [c](blob:x)",
        "<javascript:alert(1)>",
        "![a](https://a.example/b.png)",
        "[a](/v1/models) [b](//a.example) [c](#d)",
        '```"><img src=x onerror=alert(1)>\n<img src=x onerror=alert(1)>\n```',
        "```html\n<img src=x onerror=alert(1)>\n```",
        "| <img src=x onerror=alert(1)> | b |\n|---|---|\n| <svg onload=alert(1)> | d |",
        "- [x] <iframe src=javascript:alert(1)>",
        "$<img src=x onerror=alert(1)>$ $$\\text{<img src=x onerror=alert(1)>}$$",
        "\\[ \\href{javascript:alert(1)}{x} \\] $\\unknown{<b>}$",
        '[<img src=x onerror=alert(1)>](https://a.example "><img src=x onerror=alert(1)>")',
    ],
)
def test_markup_of_an_answer_stays_text(page: Page, text: str) -> None:
    found: dict[str, Any] = page.evaluate(
        "import('/static/markdown/view.js').then(({ MarkdownView }) => {"
        "const node = document.querySelector('main').appendChild(document.createElement('div'));"
        f"new MarkdownView(node).update({json.dumps(text)});"
        "const all = [...node.querySelectorAll('*')];"
        "return { tags: all.map(one => one.localName), links: all.filter(one => one.href).map(one => one.href),"
        "handlers: all.flatMap(one => one.getAttributeNames()).filter(name => name.startsWith('on')) }; })"
    )
    forbidden = {"img", "script", "svg", "iframe", "object", "embed", "style", "form", "link", "base"}
    assert not forbidden & set(found["tags"])
    assert found["handlers"] == []
    assert all(link.startswith("https://a.example") for link in found["links"])


def test_a_growing_answer_becomes_the_same_as_a_whole_one(page: Page) -> None:
    whole = _show(page, _SAMPLE)
    assert _show(page, *(_SAMPLE[:end] for end in range(1, len(_SAMPLE) + 1))) == whole
    assert _show(page, *(_SAMPLE[:end] for end in range(7, len(_SAMPLE) + 7, 7))) == whole
    for part in ("<h3", "<ol", "<ul", "<table", "<blockquote", "<math", 'class="keyword"', "<input"):
        assert part in whole, part


def test_only_the_end_of_a_growing_answer_changes(page: Page) -> None:
    changed: list[int] = page.evaluate(
        "import('/static/markdown/view.js').then(({ MarkdownView }) => {"
        "const node = document.createElement('div'), view = new MarkdownView(node);"
        "let text = Array.from({ length: 50 }, (_, number) => `Paragraph ${number}`).join('\\n\\n') + '\\n\\n```js\\n';"
        "view.update(text); const before = [...node.childNodes]; const counts = [];"
        "for (let line = 0; line < 3; line++) { view.update(text += `let a = ${line};\\n`);"
        "  counts.push(before.filter((one, number) => node.childNodes[number] !== one).length); }"
        "const first = node.querySelector('.line'); view.update(text += 'let b;');"
        "counts.push(node.querySelector('.line') === first ? 0 : 1); return counts; })"
    )
    assert changed == [0, 0, 0, 0]


def test_code_has_its_language_colours_and_a_copy_button(page: Page) -> None:
    code = 'x = "a"  # one\ny = """\nfor\n"""\nfor i in range(0x1F): f(i)\n'
    markup = _show(page, f"```python\n{code}```")
    assert "<span>python</span>" in markup
    assert '<span class="text">"a"</span>  <span class="comment"># one</span>' in markup
    assert '<span class="line"><span class="text">for</span>\n</span>' in markup, "a text over several lines"
    assert (
        '<span class="keyword">for</span> i <span class="keyword">in</span> <span class="name">range</span>' in markup
    )
    assert '<span class="number">0x1F</span>' in markup
    assert '<span class="name">"a"</span>: <span class="number">1</span>' in _show(page, '```json\n{"a": 1}\n```')
    assert '<span class="added">+a</span>' in _show(page, "```diff\n+a\n-b\n```")
    assert "<span>text</span>" in _show(page, "```\na\n```")
    page.send("Browser.grantPermissions", permissions=["clipboardReadWrite"])
    copied = page.evaluate(
        "(async () => { const { CodeBlock } = await import('/static/markdown/render.js');"
        "const { node } = new CodeBlock({ language: 'sh', text: 'echo 1\\necho 2' }); document.body.append(node);"
        "let text; navigator.clipboard.writeText = async value => { text = value; };"
        "node.querySelector('button').click(); await 0; await 0; return text; })()"
    )
    assert copied == "echo 1\necho 2"


@pytest.mark.parametrize(
    ("tex", "parts"),
    [
        (r"\frac{a}{b}", ["<mfrac><mi>a</mi><mi>b</mi></mfrac>"]),
        (r"x^{2}_i", ["<msubsup><mi>x</mi><mi>i</mi><mn>2</mn></msubsup>"]),
        (r"\sqrt[3]{x}", ["<mroot><mi>x</mi><mn>3</mn></mroot>"]),
        (r"\sum_{i=1}^n i", ["<munderover><mo>∑</mo>"]),
        (r"\left( a \right]", ['<mo fence="true" stretchy="true">(</mo>', '<mo fence="true" stretchy="true">]</mo>']),
        (r"\begin{pmatrix} a & b \\ c & d \end{pmatrix}", ["<mtr><mtd><mi>a</mi></mtd><mtd><mi>b</mi></mtd></mtr>"]),
        (r"\begin{cases} 1 & x > 0 \\ 0 & \text{else} \end{cases}", ['<mtable class="cases">', "<mtext>else</mtext>"]),
        (r"\alpha \leq \mathbb{R}, f'(x)", ["<mi>α</mi>", "<mo>≤</mo>", ">ℝ<", "<mo>′</mo>"]),
        (r"3.14 \times 1{,}000", ["<mn>3.14</mn><mo>×</mo>"]),
        (r"\hat{y} = \boxed{42}", ['<mover accent="true">', '<mrow class="boxed"><mn>42</mn></mrow>']),
    ],
)
def test_math_is_laid_out_by_the_browser(page: Page, tex: str, parts: list[str]) -> None:
    markup = _show(page, f"$$\n{tex}\n$$")
    assert markup.startswith('<math display="block">')
    for part in parts:
        assert part in markup
    assert page.evaluate(
        "document.createElementNS('http://www.w3.org/1998/Math/MathML', 'mfrac') instanceof MathMLElement"
    )


@pytest.mark.parametrize(
    "tex",
    [
        r"\unknown{x}",
        r"\frac{a}",
        "a^",
        r"\left( a",
        "{" * 90 + "}" * 90,
        r"\constructor x",
        r"\not",
        r"{\not}",
        *(rf"{command} " * 90 + "x" for command in (r"\hat", r"\sqrt", r"\frac 1", r"\boxed", r"\not", r"\mathbf")),
        r"\hat " * 9000 + "x",
    ],
)
def test_math_that_is_not_understood_shows_its_source(page: Page, tex: str) -> None:
    assert _show(page, f"${tex}$") == f'<p><code class="tex">{tex}</code></p>'
    assert _show(page, f"\\[\n{tex}\n\\]") == f'<pre class="tex">{tex}</pre>'


@pytest.mark.parametrize(
    "text",
    [
        "*a _b " * 9000,
        "a* b_ **" * 9000,
        "[](" * 9000,
        "` `` ``` " * 9000,
        "*a**b" * 9000,
        "> " * 9000,
        "- " * 9000,
        "$$ a\n" * 9000,
        "| a " * 9000 + "\n" + "|-" * 9000,
        "[" * 50_000,
        "<" * 50_000,
        f"http://a{')' * 400_000}",
        f"http://a{'.' * 400_000}x",
        f"# a{'#' * 400_000}x",
        f"```{' ' * 400_000}`",
        "a\n" * 150_000,
        f"```js\n{'a() ' * 150_000}\n```",
    ],
)
def test_hostile_text_is_shown(page: Page, text: str) -> None:
    assert len(_show(page, text)) > 9000 or text.startswith((">", "- "))


def test_what_cannot_be_rendered_is_shown_as_text_and_the_rest_as_usual(page: Page) -> None:
    lines = "\n".join(["*a*"] * 150_000)
    assert _show(page, f"*b*\n\n{lines}\n\n*c*") == f'<p><em>b</em></p><p class="source">{lines}</p><p><em>c</em></p>'
