"""What every page of the book owes its readers, checked on the notebooks; and the README as GitHub shows it."""
import json
import re

import pytest
from conftest import ROOT, notebooks

BOOK = [nb for nb in notebooks() if nb.as_posix() != 'index.ipynb']
pages = pytest.mark.parametrize('nb', BOOK, ids=lambda p: p.with_suffix('').as_posix())

def cells(nb): return json.loads((ROOT/'nbs'/nb).read_text(encoding='utf-8'))['cells']
def markdown(nb): return '\n\n'.join(''.join(c['source']) for c in cells(nb) if c['cell_type'] == 'markdown')
def without_code(text): return re.sub(r'^```.*?^```|`[^`\n]*`', '', text, flags=re.S | re.M)

@pytest.mark.parametrize('nb', notebooks(), ids=lambda p: p.with_suffix('').as_posix())
def test_title_and_one_line(nb):
    title, line = re.fullmatch(r'# (.+)\n\n> (.+?)\n*(?:- .*\n?)*', ''.join(cells(nb)[0]['source'])).groups()
    assert len(title) <= 60 and 15 <= len(line) <= 130 and not line.endswith('.')

@pages
def test_a_page_says_what_it_leaves_out(nb):
    heads = re.findall(r'^## (.+?)(?: \{.*\})?$', without_code(markdown(nb)), re.M)
    assert heads[-1] == 'What this leaves out', heads[-2:]
    last = markdown(nb).rpartition('## What this leaves out')[2]
    assert len(last.split()) >= 12
    if 'exercises' not in nb.parts: assert re.search(r'\*Exercises?\.\*', last), 'an exercise at the end'

@pages
def test_figures_have_label_caption_and_alt_text(nb):
    for c in cells(nb):
        source = ''.join(c['source'])
        if c['cell_type'] != 'code' or re.search(r'^#\| *hide\b', source, re.M): continue
        if any('image/png' in o.get('data', {}) for o in c['outputs']):
            for option in ('label: fig-', 'fig-cap:', 'fig-alt:'): assert re.search(rf'^#\| *{option}', source, re.M), f'{option} is missing:\n{source[:200]}'
            alt, caption = (re.search(rf'^#\| *fig-{key}: *(.+)$', source, re.M)[1] for key in ('alt', 'cap'))
            assert len(alt.split()) >= 8 and alt != caption, 'an alternative text describes the picture'
    assert not re.search(r'!\[\]\((?!.*fig-alt)', without_code(markdown(nb))), 'an image without alternative text'

def test_every_citation_is_in_the_reading_list():
    bib = set(re.findall(r'^@\w+\{([^,\s]+),', (ROOT/'nbs'/'references.bib').read_text(encoding='utf-8'), re.M))
    reading = next(nb for nb in notebooks() if nb.name.endswith('_reading.ipynb'))
    cited = lambda nb: set(re.findall(r'@(\w+\d{4}\w*)', without_code(markdown(nb))))
    everywhere = set().union(*map(cited, notebooks()))
    assert everywhere <= bib, 'a key that references.bib does not have'
    assert everywhere <= cited(reading), f'not in the reading list: {everywhere - cited(reading)}'
    assert bib <= cited(reading), f'in references.bib, not in the reading list: {bib - cited(reading)}'

# What a reader must be able to explain: a piece of its question in the table of `questions`
TO_EXPLAIN = ('RLVR and GRPO', 'policy gradient', 'baseline', 'degenerate group', 'exploration', 'KL and entropy', 'reward hacking', 'evidence',
              'generation is the cost', 'DPO', 'outcome rewards and process rewards', 'agent', 'production GRPO', 'raise no error', 'to run this')

def test_every_question_has_an_answer():
    nb = next(nb for nb in notebooks() if nb.name.endswith('_questions.ipynb'))
    text = markdown(nb)
    table = [row.split('|')[1:-1] for row in re.findall(r'^\|.*\|$', text.partition('## The table')[2].partition('\n## ')[0], re.M)[2:]]
    asked = ' '.join(question for question,*_ in table)
    assert not [t for t in TO_EXPLAIN if t not in asked]
    for question,short,long in table:
        here = re.fullmatch(r' \[here\]\(#(sec-q-[\w-]+)\) ', short)[1]
        answer = text.partition(f'{{#{here}}}')[2].partition('\n## ')[0]
        assert len(answer.split()) > 25, question
        assert re.search(r'\]\([^)]*\.ipynb', long), question              # its anchor is checked in the browser

PITFALLS = ('prompt', 'spread', 'zero', 'temperature', 'reference', 'reward', 'initialization', 'parameter')

def test_every_pitfall_is_shown_with_its_symptom():
    nb = next(nb for nb in notebooks() if nb.name.endswith('_pitfalls.ipynb'))
    sections = re.split(r'^## ', markdown(nb), flags=re.M)[1:9]
    for word,section in zip(PITFALLS, sections):
        assert word in section.splitlines()[0].lower() and '**Symptom.**' in section

# ---------- the README

@pytest.fixture(scope='module')
def readme():
    import cmarkgfm
    text = (ROOT/'README.md').read_text(encoding='utf-8')
    return text, cmarkgfm.github_flavored_markdown_to_html(text)

def test_readme_links_lead_somewhere(readme):
    links = re.findall(r'(?:href|src)="([^"]+)"', readme[1])
    assert len(links) > 20
    for link in links:
        assert 'example.org' not in link
        if not re.match(r'[a-z]+:|#', link): assert (ROOT/link.partition('#')[0]).exists(), f'dead link: {link}'

def test_every_notebook_is_on_the_map(readme):
    missing = [nb for nb in notebooks() if nb.as_posix() != 'index.ipynb' and f'](nbs/{nb.as_posix()})' not in readme[0]]
    assert not missing, 'run nbs/index.ipynb again (make notebooks ARGS=nbs/index.ipynb) and `make export`'

def test_readme_renders_on_github(readme):
    text, page = readme
    assert page.count('<table>') >= 1 and page.count('<img') >= 1 and all(re.findall(r'<img [^>]*alt="[^"]{20,}"', page))
    prose = re.sub(r'<pre>.*?</pre>|<code>.*?</code>', '', page, flags=re.S)
    left = r'\{[.#]|:::|@(?:fig|tbl|eq|sec)-|\[@|^\|(?!\|)|\\\(|\\\[|#\|'
    assert not re.findall(left, prose, re.M), "Quarto's syntax, which GitHub does not know"
    for formula in re.findall(r'\$[^$\n]+\$', without_code(text)): assert '\\' not in formula or re.match(r'\$\S.*\S\$', formula)

def test_readme_says_what_a_visitor_asks(readme):
    for part in ('## Two commands', '## Twenty lines', '## The map', '## How to cite', 'make demo', 'make test', 'held-out', 'Apache-2.0'): assert part in readme[0]
