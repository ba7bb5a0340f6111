"""What `tools/finish.py` adds to pages, on the markup of both builders; reading times; the order of the sidebar."""
import sys
from types import SimpleNamespace

import pytest
import yaml
from conftest import ROOT

sys.path.insert(0, str(ROOT/'tools'))
import finish as fin  # noqa: E402

CFG = SimpleNamespace(title='g2c_rl', description='Small & readable', doc_host='https://ada.github.io', doc_baseurl='/g2c_rl')
PAGE = fin.Page(None, 'experiments/format.html', 'Experiments', 'A "format"', 'Is it <JSON>?', 3, None)

QUARTO = '''<!DOCTYPE html>
<html xmlns="http://www.w3.org/1999/xhtml" lang="en"><head>
<meta name="description" content="Is it &lt;JSON&gt;?">
</head>
<body class="nav-sidebar docked nav-fixed quarto-light">
<div id="quarto-content" class="quarto-container page-columns page-rows-contents page-layout-article page-navbar">
<main class="content" id="quarto-document-content">
<header id="title-block-header" class="quarto-title-block default"><nav class="quarto-page-breadcrumbs"></nav>
<div class="quarto-title"><h1 class="title">A "format"</h1></div>
</header>
<table class="table"><thead><tr><th>a</th></tr></thead></table>
</main></div></body></html>'''
SMALL = '''<!doctype html><html lang="en"><head><title>x</title></head><body class="nav-sidebar docked"><div id="quarto-content">
<main class="content" id="quarto-document-content"><header id="title-block-header"><h1>A "format"</h1></header><table><tr></tr></table>
</main></div></body></html>'''

@pytest.mark.parametrize('page', [QUARTO, SMALL], ids=['quarto', 'smalldocs'])
def test_a_page_is_finished(page):
    s = fin.finish_page(page, PAGE, CFG)
    body = s.partition('<body')[2]
    assert body.partition('>')[2].startswith('<a class="skip-link" href="#quarto-document-content">')
    assert '<main tabindex="-1" class="content" id="quarto-document-content">' in s
    assert s.index('about 3 minutes</p></header>') > s.index('title-block-header')
    assert s.count('<div class="table-scroll"><table') == s.count('</table></div>') == 1
    head = s.partition('</head>')[0]
    for tag in ('<meta property="og:title" content="A &quot;format&quot; – g2c_rl">', '<meta property="og:description" content="Is it &lt;JSON&gt;?">',
                '<meta property="og:url" content="https://ada.github.io/g2c_rl/experiments/format.html">',
                '<meta name="twitter:image" content="https://ada.github.io/g2c_rl/card.png">', '<script src="../site.js" defer>', '<link rel="icon" href="data:'):
        assert head.count(tag) == 1, tag

def test_lists_for_machines():
    pages = [fin.Page(None, 'index.html', '', 'Home', 'h', 1, None), fin.Page(None, 'a.html', 'One', 'A', 'a', 1, None), PAGE]
    assert fin.llms_txt(pages, CFG) == ('# g2c_rl\n\n> Small & readable\n\n## Where to begin\n\n- [Home](index.html): h\n\n## One\n\n'
                                        '- [A](a.html): a\n\n## Experiments\n\n- [A "format"](experiments/format.html): Is it <JSON>?\n')
    assert fin.sitemap(pages, CFG).count('<loc>https://ada.github.io/g2c_rl/') == 3

def notebook(*cells):
    return dict(cells=[dict(cell_type='raw', source='---\n---')] + [dict(cell_type=k, source=s, outputs=o) for k,s,*o in cells])

def test_reading_time():
    words = ('markdown', 'word ' * 440)
    assert fin.reading_minutes(notebook(words)) == 2
    assert fin.reading_minutes(notebook(words, ('markdown', '$$x$$ ' * 6))) == 3                       # equations take time, not words
    assert fin.reading_minutes(notebook(words, ('code', 'x = 1\n' * 20))) == 3
    assert fin.reading_minutes(notebook(words, ('code', '#| echo: false\n' + 'x = 1\n' * 500))) == 2     # what is not shown is not read
    assert fin.reading_minutes(notebook(words, ('markdown', '```\n' + 'long line of code\n' * 16 + '```'))) == 3

def test_sidebar_patterns_stand_for_notebooks_by_number(tmp_path):
    for name in ('index', '02_b', '01_a', 'experiments/50_z', 'experiments/41_y', 'experiments/index'):
        (tmp_path/f'{name}.ipynb').parent.mkdir(exist_ok=True)
        (tmp_path/f'{name}.ipynb').touch()
    config = dict(website=dict(sidebar=dict(contents=[dict(text='Home', href='index.ipynb'), dict(section='A', contents='/0*.ipynb'),
        dict(section='E', href='experiments/index.ipynb', contents='experiments/[0-9]*.ipynb')])))
    found = [[p.as_posix() for p in paths] for _,paths in fin.expand_sidebar(config, tmp_path)]
    assert found == [['index.ipynb'], ['01_a.ipynb', '02_b.ipynb'],
                     ['experiments/index.ipynb', 'experiments/41_y.ipynb', 'experiments/50_z.ipynb']]

def test_sidebar_and_render_list_the_same_folders():
    config = yaml.safe_load((ROOT/'_quarto.yml').read_text(encoding='utf-8'))
    listed = {p.as_posix() for _,paths in fin.expand_sidebar(config, ROOT/'nbs') for p in paths}
    rendered = {p.relative_to(ROOT/'nbs').as_posix() for pattern in config['project']['render'] for p in (ROOT/'nbs').glob(pattern.lstrip('/'))}
    assert listed == rendered
