"""The site as readers get it: built from the notebooks, and every page opened in a real browser."""
import os, re, shutil, sys, threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
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
    next: all('.nav-page-next a').map(a => a.href),
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

def test_search_finds_a_function(visitor):
    page = visitor.open('index.html')
    button = page.query_selector('#quarto-search button, .aa-DetachedSearchButton')
    if button: button.click()
    box = page.wait_for_selector('input.aa-Input, #quarto-search input, input[type=search]')
    box.click()
    box.type('verify_arithmetic', delay=20)
    page.wait_for_selector('.search-result-link, .aa-Item a, .search-results a, [class*=search] a[href*="tasks.html"]')

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
