"""The site as readers get it: built from the notebooks, and every page opened in a real browser."""
import json, os, re, shutil, sys, threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin

import pytest
import yaml
from conftest import ROOT, notebooks, run

BROWSERS = 'chromium', 'chromium-browser', 'google-chrome', '/Applications/Google Chrome.app/Contents/MacOS/Google Chrome'
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
QUIET = '--no-sandbox --disable-gpu --disable-quic --disable-background-networking --disable-component-update --disable-sync --no-first-run'

pytestmark = pytest.mark.skipif(not CHROMIUM and 'CI' not in os.environ, reason='no Chromium found (under CI that is a failure)')

def page_name(nb): return nb.with_name(re.sub(r'^\d+_', '', nb.stem) + '.html').as_posix()
PAGES = [page_name(nb) for nb in notebooks()]

# What one page tells about itself, in one visit
FACTS = r"""() => {
  const all = (s, root=document) => [...root.querySelectorAll(s)], main = document.querySelector('main').cloneNode(true)
  all('pre, code, .katex, script, style', main).forEach(e => e.remove())
  return {
    title: document.title, prose: main.textContent,
    katex_errors: all('.katex-error').map(e => e.title),
    broken_images: all('img').filter(i => !(i.complete && i.naturalWidth)).length,
    no_alt: all('main img').filter(i => !(i.alt || '').trim()).map(i => i.src.slice(0, 60)),
    links: all('a[href]').map(a => a.href), ids: all('[id]').map(e => e.id),
    sidebar: all('#quarto-sidebar a.sidebar-link[href*=".html"]').map(a => a.href),
    next: all('.nav-page-next a').map(a => a.href), previous: all('.nav-page-previous a').map(a => a.href),
    lang: document.documentElement.lang, reading: all('.page-facts').map(e => e.textContent),
    meta: Object.fromEntries(all('meta[name], meta[property]').map(e => [e.getAttribute('name') || e.getAttribute('property'), e.content])),
    displayed: all('main .katex-display').length, images: all('main img').length,
    captions: all('main figcaption').map(e => e.textContent.trim()),
  }
}"""

@pytest.fixture(scope='module')
def failure(repo):
    "None, or why the site could not be built"
    try: run(sys.executable, 'tools/build_site.py', cwd=repo)
    except pytest.fail.Exception as e: return e

def test_site_builds(failure):
    if failure: raise failure

@pytest.fixture(scope='module')
def site(repo, failure):
    "The address of a freshly built site, served from a copy of the repository"
    if failure: pytest.skip('the site was not built')
    quiet = type('Quiet', (SimpleHTTPRequestHandler,), dict(log_message=lambda *_: None))
    server = ThreadingHTTPServer(('127.0.0.1', 0), partial(quiet, directory=repo/'_docs'))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f'http://127.0.0.1:{server.server_port}/'
    server.shutdown()

def source_of(name):
    "The notebook that a page is made from"
    return next(json.loads((ROOT/'nbs'/nb).read_text(encoding='utf-8')) for nb in notebooks() if page_name(nb) == name)

def shown(nb):
    "Source and outputs of the code cells whose outputs a page shows"
    hidden = re.compile(r'^#\| *(hide\b|export\b|include: *false|output: *false)', re.M)
    for c in nb['cells']:
        source = ''.join(c['source'])
        if c['cell_type'] == 'code' and not hidden.search(source): yield source, c['outputs']

class Visitor:
    "A browser that notes console errors, failed loads, and every request that leaves the site"
    def __init__(self, context, base):
        self.page, self.base, self.errors, self.outside, self.seen = context.new_page(), base, [], [], {}
        context.route('**/*', self.route)
        self.page.on('console', lambda m: self.errors.append(m.text) if m.type == 'error' else None)
        self.page.on('pageerror', lambda e: self.errors.append(str(e)))
        self.page.on('response', lambda r: self.errors.append(f'{r.status} {r.url}') if r.status >= 400 else None)

    def route(self, route):
        if route.request.url.startswith((self.base, 'data:')): return route.continue_()
        self.outside.append(route.request.url)
        route.abort()

    def open(self, name, width=1280):
        self.page.set_viewport_size(dict(width=width, height=844))
        self.page.goto(self.base + name)
        self.page.wait_for_load_state('networkidle')
        return self.page

    def facts(self, name):
        if name not in self.seen: self.seen[name] = self.open(name).evaluate(FACTS)
        return self.seen[name]

@pytest.fixture(scope='module')
def visitor(site):
    from playwright.sync_api import sync_playwright
    assert CHROMIUM, 'CI has to run the browser tests: install Chromium'
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=QUIET.split())
        yield Visitor(browser.new_context(), site)
        browser.close()

@pytest.mark.parametrize('name', PAGES)
def test_page(visitor, name, repo):
    del visitor.errors[:], visitor.outside[:]
    visitor.seen.pop(name, None)
    facts = visitor.facts(name)
    assert facts['title'].strip()
    assert not visitor.errors
    assert not visitor.outside
    assert not facts['katex_errors']
    assert not facts['broken_images'] and not facts['no_alt']
    unresolved = r'\\\(|\\\[|\\begin|\\frac|\$\$|\S*\?@\S*|@(?:fig|tbl|eq|sec)-\S*'
    assert not re.findall(unresolved, facts['prose']), 'raw TeX or an unresolved reference'
    assert (repo/'_docs'/name).stat().st_size < 1_500_000

@pytest.mark.parametrize('name', PAGES)
def test_nothing_is_missing(visitor, name):
    nb, facts = source_of(name), visitor.facts(name)
    text = '\n'.join(''.join(c['source']) for c in nb['cells'] if c['cell_type'] == 'markdown')
    assert facts['displayed'] >= text.count('$$')//2, 'an equation is not displayed'
    figures = sum('image/png' in o.get('data', {}) for _,outs in shown(nb) for o in outs)
    assert facts['images'] >= figures, 'a figure is not shown'
    assert len([c for c in facts['captions'] if re.match(r'Figure\s\d+: .', c)]) >= figures, 'a figure has no caption'

@pytest.mark.parametrize('name', PAGES)
def test_a_page_introduces_itself(visitor, name):
    facts = visitor.facts(name)
    meta, description = facts['meta'], re.search(r'^> (.+)', ''.join(source_of(name)['cells'][0]['source']), re.M)[1]
    assert facts['lang'] == 'en'
    assert re.fullmatch(r'about \d+ minutes?', *facts['reading'])
    for key in ('description', 'og:description', 'twitter:description'): assert meta[key].replace('`', '') == description.replace('`', ''), key
    assert meta['og:title'].startswith(facts['title'].split(' – ')[0]) and meta['twitter:card'] == 'summary_large_image'
    assert meta['og:url'].endswith('/' + name) and meta['og:image'].startswith('https://') and meta['og:image'].endswith('/card.png')

@pytest.mark.parametrize('name', PAGES)
def test_links(visitor, name, repo):
    for link in visitor.facts(name)['links']:
        assert 'example.org' not in link, 'a link to the placeholder in settings.ini'
        if not link.startswith(visitor.base): continue
        path, anchor = urldefrag(link.removeprefix(visitor.base))
        target = unquote(path) or 'index.html'
        assert (repo/'_docs'/target).is_file(), f'dead link: {link}'
        if anchor and target.endswith('.html'): assert unquote(anchor) in visitor.facts(target)['ids'], f'dead anchor: {link}'

@pytest.mark.parametrize('name', PAGES)
def test_no_page_is_wider_than_a_phone(visitor, name):
    page = visitor.open(name, width=390)
    wide = """() => [...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1)
        .filter(e => { for (let p = e; p.tagName != 'MAIN'; p = p.parentElement) if (getComputedStyle(p).overflowX != 'visible') return false; return true })
        .map(e => e.tagName + ' ' + e.className + ' ' + e.textContent.slice(0, 40))"""
    assert page.evaluate('document.documentElement.scrollWidth') <= 390
    assert not page.evaluate(wide), 'wider than the screen, and not in a box that scrolls'

def test_sidebar_lists_every_page_once_in_reading_order(visitor, site):
    sidebar = [urljoin(site, l).removeprefix(site) for l in visitor.facts('index.html')['sidebar']]
    assert sorted(sidebar) == sorted(PAGES), 'list new folders in the sidebar of _quarto.yml'
    name, walk = 'index.html', ['index.html']
    while following := visitor.facts(name)['next']:
        name = following[0].removeprefix(site)
        walk.append(name)
    assert walk == sidebar
    assert walk[:3] == ['index.html', 'start.html', 'tasks.html'] and walk[-1].startswith('exercises/')
    for before,after in zip(walk, walk[1:]): assert visitor.facts(after)['previous'] == [urljoin(site, before)]

def test_the_listing_shows_every_experiment(visitor, site):
    page = visitor.open('experiments/index.html')
    cards = page.evaluate("[...document.querySelectorAll('.listed')].map(e => [e.querySelector('a').href, e.innerText.split('\\n').length])")
    assert [h.removeprefix(site) for h,_ in cards] == [p for p in PAGES if p.startswith('experiments/') and p != 'experiments/index.html']
    assert all(lines > 1 for _,lines in cards), 'a card has a title and a description'

def test_files_for_machines(site, repo):
    text = (repo/'_docs'/'llms.txt').read_text()
    entries = re.findall(r'^- \[(.+?)\]\((.+?)\): (.+)$', text, re.M)
    assert sorted(href for _,href,_ in entries) == sorted(PAGES) and len(entries) == text.count('\n- ')
    assert text.startswith('# g2c_rl\n\n> ') and '## The algorithm' in text
    addresses = re.findall('<loc>(.+?)</loc>', (repo/'_docs'/'sitemap.xml').read_text())
    assert sorted(a.split('/g2c_rl/')[1] for a in addresses) == sorted(PAGES)
    size = (repo/'_docs'/'card.png').read_bytes()[16:24]
    assert size == (1200).to_bytes(4, 'big') + (630).to_bytes(4, 'big')

def test_a_wrong_address_leads_on(visitor, site, repo):
    del visitor.errors[:], visitor.outside[:]
    page = visitor.open('404.html', width=390)
    links = page.evaluate("[...document.querySelectorAll('a')].map(a => a.getAttribute('href'))")
    assert len(links) > 8 and not visitor.errors and not visitor.outside
    for link in links: assert link.startswith('/g2c_rl/') and (repo/'_docs'/link.removeprefix('/g2c_rl/')).is_file(), link
    for scheme in ('dark', 'light'):
        page.emulate_media(color_scheme=scheme)
        assert not findings(page)

AXE = Path(find_spec('axe_playwright_python').submodule_search_locations[0])/'axe.min.js'

def findings(page, only=''):
    "What axe-core calls serious or critical on the page that is open"
    page.evaluate(AXE.read_text(encoding='utf-8'))
    violations = page.evaluate(f"axe.run({{preload: false, resultTypes: ['violations'], {only}}}).then(r => r.violations)")
    return [f"{v['id']}: {n['html'][:120]}" for v in violations if v['impact'] in ('serious', 'critical') for n in v['nodes']]

@pytest.fixture
def dark(visitor):
    "A reader who prefers dark pages"
    visitor.page.emulate_media(color_scheme='dark')
    yield visitor
    visitor.page.emulate_media(color_scheme='light')

@pytest.mark.parametrize('name', PAGES)
def test_accessible(visitor, name): assert not findings(visitor.open(name))

@pytest.mark.parametrize('name', PAGES)
def test_accessible_in_the_dark(dark, name):
    "The scheme changes colours and nothing else"
    page = dark.open(name)
    assert page.query_selector('.quarto-dark')
    assert not findings(page, "runOnly: ['color-contrast']")

ONE_OF_EACH = sorted({str(Path(p).parent): p for p in PAGES}.values())

@pytest.mark.parametrize('name', ONE_OF_EACH)
def test_accessible_on_a_phone(dark, name):
    "Where other bars are shown"
    assert not findings(dark.open(name, width=390))

def test_axe_finds_what_is_wrong(visitor):
    page = visitor.open('start.html')
    page.evaluate("document.querySelector('main p').style.color = '#ccc'")
    assert any('color-contrast' in f for f in findings(page))

FOCUS = """(() => { const e = document.activeElement, r = e.getBoundingClientRect()
    return [e.className, e.id, r.left >= 0 && r.top >= 0 && r.width > 0] })()"""

def test_keyboard(visitor):
    page = visitor.open('loss.html')
    page.keyboard.press('Tab')
    assert page.evaluate(FOCUS) == ['skip-link', '', True], 'the first Tab shows a way past the bars'
    page.keyboard.press('Enter')
    assert page.evaluate(FOCUS)[1] == 'quarto-document-content'
    page, reached, unseen = visitor.open('loss.html'), set(), []
    for _ in range(60):
        page.keyboard.press('Tab')
        reached.add(page.evaluate('document.activeElement.className'))
        if page.evaluate("getComputedStyle(document.activeElement).outlineStyle == 'none'"):
            unseen.append(page.evaluate('document.activeElement.outerHTML.slice(0, 80)'))
    assert not unseen, 'the focus has to be seen'
    for part in ('quarto-color-scheme-toggle', 'sidebar-link', 'sidebar-item-toggle', 'nav-link'):
        assert any(part in c for c in reached), f'{part} is out of reach'
    toggle = page.query_selector('#quarto-sidebar .sidebar-item-toggle[aria-expanded=false]')
    toggle.focus()
    page.keyboard.press('Enter')
    page.wait_for_function('e => e.getAttribute("aria-expanded") == "true"', arg=toggle)

def test_menu_on_a_phone(visitor):
    page = visitor.open('loss.html', width=390)
    shown = """(() => { const r = document.querySelector('#quarto-sidebar').getBoundingClientRect()
        return r.width > 100 && r.left >= 0 && r.right <= innerWidth + 1 })()"""
    page.query_selector('.quarto-btn-toggle:visible').focus()
    page.keyboard.press('Enter')
    page.wait_for_function(shown)
    page.keyboard.press('Escape')
    page.wait_for_function('!' + shown)

def search(visitor, words):
    "Type into the search box of the home page and wait for results"
    page = visitor.open('index.html')
    button = page.query_selector('#quarto-search button, .aa-DetachedSearchButton')
    if button: button.click()
    box = page.wait_for_selector('input.aa-Input, #quarto-search input, input[type=search]')
    box.click()
    box.type(words, delay=20)
    page.wait_for_selector('.search-result, .aa-Item a')
    return page

def test_search_finds_a_function(visitor):
    page = search(visitor, 'verify_arithmetic')
    page.wait_for_selector('.search-result-link, .aa-Item a, .search-results a, [class*=search] a[href*="tasks.html"]')

@pytest.mark.parametrize('scheme', ['light', 'dark'])
def test_what_was_found_can_be_read(visitor, scheme):
    visitor.page.emulate_media(color_scheme=scheme)
    try:
        search(visitor, 'degenerate')
        assert not findings(visitor.page)
    finally: visitor.page.emulate_media(color_scheme='light')

def test_search_by_keyboard(visitor):
    search(visitor, 'wilson_interval')
    visitor.page.keyboard.press('Enter')
    visitor.page.wait_for_url('**/*evaluation.html*')

def test_dark_mode(visitor):
    page = visitor.open('index.html')
    background = lambda: page.evaluate('getComputedStyle(document.body).backgroundColor')
    light = background()
    page.click('.quarto-color-scheme-toggle:visible')
    page.wait_for_timeout(500)
    assert background() != light
    page.click('.quarto-color-scheme-toggle:visible')

def test_every_notebook_is_rendered(site, repo):
    patterns = yaml.safe_load((ROOT/'_quarto.yml').read_text())['project']['render']
    assert sorted(p.relative_to(ROOT/'nbs') for pat in patterns for p in (ROOT/'nbs').glob(pat.lstrip('/'))) == notebooks()
    assert {p.relative_to(repo/'_docs').as_posix() for p in (repo/'_docs').rglob('*.html')} >= set(PAGES)
