"""What the site has beyond its chapters, made once for both builders: order, reading times, cards, and files for machines.

`describe` reads the processed notebooks before they are rendered, `finish` edits the finished pages.
"""
import html, json, math, os, re
from base64 import b64decode
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from textwrap import fill

import yaml

WORDS, CODE, EQUATION, FIGURE = 220, 3, 10, 15      # words a minute; seconds for a line of code, a displayed equation, a figure
LISTING = re.compile(r'^::: \{\.listing\}\n:::$', re.M)


# ---------- before rendering

@dataclass
class Page:
    "A page of the site, in reading order"
    path: Path          # its notebook in `_proc`
    href: str           # its address from the root of the site
    part: str           # the part of the book, empty for what comes before the first
    title: str
    description: str
    minutes: int        # reading time
    figure: tuple       # the first figure as (PNG bytes, alternative text), or None

def expand_sidebar(config, proc):
    "The entries of the sidebar in `_quarto.yml`, each with its notebooks: a pattern stands for those that match, by number"
    for e in config['website']['sidebar']['contents']:
        index = [Path(e['href'])] if 'href' in e else []
        yield e, index + [p.relative_to(proc) for p in sorted(proc.glob(e['contents'].lstrip('/')) if 'contents' in e else [])]

def front_matter(nb): return yaml.safe_load(''.join(nb['cells'][0]['source']).strip().strip('-')) or {}

def reading_minutes(nb):
    "About how long a page takes: prose at reading speed, and a while for code, equations and figures"
    words = seconds = 0
    for c in nb['cells'][1:]:
        text, outs = ''.join(c['source']), c.get('outputs', [])
        if c['cell_type'] == 'code':
            if not re.search(r'^#\| *(echo: false|code-fold: true)', text, re.M): seconds += CODE * len(text.splitlines())
            text = '\n'.join(''.join(o['data']['text/markdown']) for o in outs if 'text/markdown' in o.get('data', {}))
        seconds += FIGURE * (sum('image/png' in o.get('data', {}) for o in outs) + text.count('!['))
        seconds += CODE * sum(len(m.splitlines()) for m in re.findall(r'^```.*?^```', text, re.S | re.M))
        text = re.sub(r'^```.*?^```', '', text, flags=re.S | re.M)
        seconds += EQUATION * len(re.findall(r'\$\$.*?\$\$', text, re.S))
        words += len(re.sub(r'\$\$.*?\$\$|\]\([^)]*\)|<[^>]+>', ' ', text, flags=re.S).split())
    return max(1, math.ceil(words/WORDS + seconds/60))

def first_figure(nb):
    "The first figure that a cell of the page drew, as PNG, with its alternative text"
    for c in nb['cells']:
        alt = re.search(r'^#\| *fig-alt: *"?(.*?)"?$', ''.join(c['source']), re.M)
        for out in c.get('outputs', []):
            if 'image/png' in out.get('data', {}): return b64decode(''.join(out['data']['image/png'])), alt[1] if alt else ''

def read_page(proc, path, part):
    "What there is to know about one page"
    nb = json.loads((proc/path).read_text(encoding='utf-8'))
    fm = front_matter(nb)
    href = path.with_name(fm['output-file']) if 'output-file' in fm else path.with_suffix('.html')
    return Page(path, href.as_posix(), part, fm['title'], fm.get('description', ''), reading_minutes(nb), first_figure(nb))

def card(page, folder):
    "One entry of a listing, as markdown"
    image, name = '', Path(page.href).stem
    if page.figure:
        png, alt = page.figure
        (folder/'thumbs').mkdir(exist_ok=True)
        (folder/'thumbs'/f'{name}.png').write_bytes(png)
        image = f"![](thumbs/{name}.png){{fig-alt=\"{alt.replace(chr(34), '')}\"}}\n\n"
    return f'::: {{.listed}}\n{image}[{page.title}]({page.path.name}){{.listed-title}}\n\n{page.description}\n:::\n'

def describe(proc):
    "The pages in reading order; leaves their order in `_proc` (Quarto sorts by it), and fills each listing with the cards of its folder"
    config = yaml.safe_load((proc.parent/'_quarto.yml').read_text(encoding='utf-8'))
    pages = [read_page(proc, p, entry.get('section', '')) for entry,paths in expand_sidebar(config, proc) for p in paths]
    for n,page in enumerate(pages):
        nb = json.loads((proc/page.path).read_text(encoding='utf-8'))
        nb['cells'][0]['source'] = '---\n' + yaml.safe_dump(front_matter(nb) | dict(order=n+1), allow_unicode=True, width=1000) + '---\n'
        for c in nb['cells']:
            if LISTING.search(s := ''.join(c['source'])):
                folder = (proc/page.path).parent
                cards = '\n'.join(card(p, folder) for p in pages if (proc/p.path).parent == folder and p is not page)
                c['source'] = LISTING.sub(lambda m: f'::::: {{.listing}}\n{cards}\n:::::', s)  # noqa: B023
        (proc/page.path).write_text(json.dumps(nb), encoding='utf-8')
    return pages


# ---------- after rendering

def site_address(cfg): return (cfg.doc_host + cfg.doc_baseurl).rstrip('/') + '/'

def meta_tags(page, cfg):
    "The tags that a link to the page is shown by elsewhere"
    title = page.title if page.title == cfg.title else f'{page.title} – {cfg.title}'
    tags = [('property', 'og:type', 'website' if page.href == 'index.html' else 'article'), ('property', 'og:site_name', cfg.title),
            ('property', 'og:title', title), ('property', 'og:description', page.description),
            ('property', 'og:url', site_address(cfg) + page.href), ('property', 'og:image', site_address(cfg) + 'card.png'),
            ('property', 'og:image:alt', f'{cfg.title}: {cfg.description}'),
            ('name', 'twitter:card', 'summary_large_image'), ('name', 'twitter:title', title),
            ('name', 'twitter:description', page.description), ('name', 'twitter:image', site_address(cfg) + 'card.png')]
    return ''.join(f'<meta {kind}="{key}" content="{html.escape(value)}">\n' for kind,key,value in tags)

ICON = ('<link rel="icon" href="data:image/svg+xml,%3Csvg xmlns=%27http://www.w3.org/2000/svg%27 viewBox=%270 0 16 16%27%3E'
        '%3Crect width=%2716%27 height=%2716%27 rx=%273%27 fill=%27%2314303f%27/%3E'
        '%3Cpath d=%27M3 12l4-5 3 2 3-6%27 fill=%27none%27 stroke=%27%23ffb066%27 stroke-width=%272%27/%3E%3C/svg%3E">\n')

def finish_page(s, page, cfg):
    "The HTML of a page with what both builders lack"
    up = '../' * page.href.count('/')
    facts = f'about {page.minutes} minute{"s" * (page.minutes > 1)}'
    s = s.replace('</head>', f'{meta_tags(page, cfg)}{ICON}<script src="{up}site.js" defer></script>\n</head>', 1)
    s = re.sub(r'<body[^>]*>', lambda m: m[0] + '<a class="skip-link" href="#quarto-document-content">Skip to the text</a>', s, count=1)
    s = re.sub(r'<main (?![^>]*tabindex)', '<main tabindex="-1" ', s, count=1)
    s = re.sub(r'(id="title-block-header".*?)(</header>)', rf'\1<p class="page-facts">{html.escape(facts)}</p>\2', s, count=1, flags=re.S)
    s = re.sub(r'<table\b', '<div class="table-scroll"><table', s)
    return s.replace('</table>', '</table></div>')

def llms_txt(pages, cfg):
    "A list of the pages for machine readers: https://llmstxt.org"
    parts = ''.join(f'\n## {part or "Where to begin"}\n\n' + ''.join(f'- [{p.title}]({p.href}): {p.description}\n' for p in group)
                    for part,group in groupby(pages, lambda p: p.part))
    return f'# {cfg.title}\n\n> {cfg.description}\n{parts}'

def sitemap(pages, cfg):
    "Every page's address"
    urls = ''.join(f'  <url><loc>{html.escape(site_address(cfg) + p.href)}</loc></url>\n' for p in pages)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">\n{urls}</urlset>\n'

NOT_FOUND = '''<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="robots" content="noindex">
{icon}<title>No such page – {title}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 1.1rem/1.6 system-ui, sans-serif; max-width: 34rem; margin: 15vh auto; padding: 0 1.25rem; color: #20262b; background: #fff }}
a {{ color: #0b5a86 }}
@media (prefers-color-scheme: dark) {{ body {{ color: #e2e6e9; background: #171b1e }} a {{ color: #7cc4ec }} }}
</style>
</head>
<body>
<main>
<h1>No such page</h1>
<p>There is nothing at this address of <a href="{root}index.html">{title}</a>. It may have been another chapter's name. From here:</p>
<ul>{links}</ul>
</main>
</body>
</html>
'''

def not_found(pages, cfg):
    "The page for addresses that lead nowhere. It is shown at any of them, so its links start at the root of the host"
    root, seen = cfg.doc_baseurl.rstrip('/') + '/', set()
    begins = [p for p in pages if not p.part or not (p.part in seen or seen.add(p.part))]     # the first pages, and each part's first
    links = ''.join(f'<li><a href="{root}{p.href}">{html.escape(p.part or p.title)}</a></li>\n' for p in begins)
    return NOT_FOUND.format(title=html.escape(cfg.title), icon=ICON, root=root, links=links)

def social_card(path, cfg, figure):
    "Draw the picture that links to the site are shown with: title, claim, result"
    os.environ.setdefault('MPLBACKEND', 'agg')
    import matplotlib.pyplot as plt
    fig = plt.figure(figsize=(12, 6.3), dpi=100, facecolor='#14303f')
    fig.text(.05, .80, cfg.title, color='white', size=46, weight='bold')
    fig.text(.05, .72, fill(cfg.description, 28), color='#d5e3ea', size=23, va='top', linespacing=1.5)
    ax = fig.add_axes((.47, .12, .5, .76))
    ax.imshow(plt.imread(figure))
    ax.axis('off')
    fig.savefig(path)
    plt.close(fig)

def finish(site, pages, cfg):
    "Edit the finished pages in the folder `site`, and add the files that machines look for"
    for p in pages:
        f = site/p.href
        f.write_text(finish_page(f.read_text(encoding='utf-8'), p, cfg), encoding='utf-8')
    (site/'site.js').write_text((cfg.nbs_path/'site.js').read_text(encoding='utf-8'), encoding='utf-8')
    (site/'llms.txt').write_text(llms_txt(pages, cfg), encoding='utf-8')
    (site/'sitemap.xml').write_text(sitemap(pages, cfg), encoding='utf-8')
    (site/'robots.txt').write_text(f'User-agent: *\nAllow: /\nSitemap: {site_address(cfg)}sitemap.xml\n', encoding='utf-8')
    (site/'404.html').write_text(not_found(pages, cfg), encoding='utf-8')
    (site/'.nojekyll').write_text('')
    social_card(site/'card.png', cfg, cfg.nbs_path/'images'/'readme-fig-result.png')
