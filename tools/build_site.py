"""Build the site in `_docs`: with Quarto where it is installed, else with smalldocs and what smalldocs lacks.

Quarto is in no package registry, so the fallback lets a machine with nothing but pip build and test every page. Both builders
start from nbdev's processed notebooks in `_proc`, where links between pages are made relative: the site works at any address.
What the fallback adds to smalldocs is file names without numbers, cross-references, citations and a KaTeX of our own.
"""
import html, json, os, re, shutil, subprocess, sys, time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import yaml
from fastcore.script import call_parse
from finish import describe, expand_sidebar, finish
from markdown_it import MarkdownIt
from nbdev.config import get_config
from nbdev.serve import proc_nbs

KINDS = dict(fig='Figure', tbl='Table', eq='Equation', sec='Section')
CODE = re.compile(r'(^```.*?^```[^\n]*$|`[^`\n]+`)', re.S | re.M)           # what is never looked into for references
BRACKETED = re.compile(r'\[([^\[\]]*?-?@[\w:-][^\[\]]*)\](?![({])')         # [see @a, section 4; @b]
NARRATIVE = re.compile(r'(?<![\w\[(/.\\-])@([a-zA-Z][\w:-]*\w)')             # @a


# ---------- the same for both builders

def is_placeholder(url): return 'example.org' in url

def site_settings(cfg):
    "What the site takes from settings.ini: addresses only when they are real ones"
    web = dict(title=cfg.title, description=cfg.description)
    if not is_placeholder(cfg.doc_host): web['site-url'] = cfg.doc_host + cfg.doc_baseurl
    if not is_placeholder(cfg.git_url): web |= {'repo-url': cfg.git_url, 'repo-branch': cfg.branch, 'repo-actions': ['source', 'issue']}
    return dict(website=web)

def read_pages(folder):
    "Every processed notebook in `folder`, by its path in it"
    return {p.relative_to(folder): json.loads(p.read_text(encoding='utf-8')) for p in sorted(folder.rglob('*.ipynb'))}

def write_page(path, nb): path.write_text(json.dumps(nb), encoding='utf-8')

def edit_file(path, edit): path.write_text(edit(path.read_text(encoding='utf-8')), encoding='utf-8')

def edit_markdown(nb, edit):
    "Apply `edit` to the text of markdown cells and of markdown outputs"
    for c in nb['cells']:
        if c['cell_type'] == 'markdown': c['source'] = edit(''.join(c['source']))
        for out in c.get('outputs', []):
            data = out.get('data', {})
            if 'text/markdown' in data: data['text/markdown'] = edit(''.join(data['text/markdown']))

def localize(nb, up, cfg):
    "Mend nbdev's links: relative ones to our own pages, none in code, none to private names, none while there is no repository"
    site = re.escape((cfg.doc_host + cfg.doc_baseurl).rstrip('/'))
    def edit(s):
        s = re.sub(r'^```.*?^```', lambda m: re.sub(r'\[(`[^`]+`)\]\([^)]*\)', r'\1', m[0]), s, flags=re.S | re.M)
        s = re.sub(rf'\[(`[^`]+`)\]\({site}/[^)#]*#_[^)]*\)', r'\1', s)
        if is_placeholder(cfg.git_url): s = re.sub(rf'\[source\]\({re.escape(cfg.git_url)}[^)]*\)\{{[^}}]*\}}', '', s)
        return re.sub(rf'\]\({site}/', f']({up}', s)
    edit_markdown(nb, edit)

def process(cfg):
    "nbdev's part: run the imports and `show_doc` of every notebook, and leave the result in `_proc`"
    (cfg.nbs_path/'nbdev.yml').write_text(yaml.safe_dump(site_settings(cfg)), encoding='utf-8')
    proc = proc_nbs(n_workers=0, force=True)
    for p,nb in read_pages(proc).items():
        localize(nb, '../'*(len(p.parts)-1), cfg)
        write_page(proc/p, nb)
    return proc


# ---------- the fallback: what smalldocs lacks

def read_bib(path):
    "A small BibTeX reader: key -> fields"
    fields = lambda body: {k.lower(): re.sub(r'[{}]', '', v).replace('--', '–').strip()
                           for k,v in re.findall(r'^\s*(\w+)\s*=\s*[{"](.*?)[}"],?\s*$', body, re.M)}
    return {m[1]: fields(m[2]) for m in re.finditer(r'^@\w+\{([^,\s]+),(.*?)^\}', path.read_text(encoding='utf-8'), re.S | re.M)}

def short_authors(entry):
    "`Shao et al.` for the text"
    names = [a.split(',')[0] for a in entry['author'].split(' and ')]
    return f'{names[0]} et al.' if len(names) > 2 or names[-1] == 'others' else ' and '.join(names)

def full_entry(entry):
    "One line of the list of references"
    venue = next((entry[k] for k in ('journal', 'booktitle', 'publisher', 'howpublished') if k in entry), '')
    link = f" <{entry['url']}>" if 'url' in entry else ''
    authors = entry['author'].replace(' and ', '; ').replace('; others', ' et al').rstrip('.')
    return f"{authors}. {entry['year']}. “{entry['title']}.” {venue}.{link}"

def cell_options(source):
    "Split a code cell into its `#| key: value` options and the rest"
    lines = source.splitlines()
    n = next((i for i,l in enumerate(lines) if not l.startswith('#|')), len(lines))
    return yaml.safe_load('\n'.join(l[2:] for l in lines[:n] if ':' in l)) or {}, '\n'.join(lines[n:])

def number_labels(nb):
    "Number figures, tables, equations and sections in reading order and write the number into each caption: label -> `Figure 1`"
    labels, count = {}, dict.fromkeys(KINDS, 0)
    def new(label):
        kind = label.split('-')[0]
        count[kind] += 1
        labels[label] = f'{KINDS[kind]} {count[kind]}'
        return labels[label]
    def equation(m):                                # the number as Quarto writes it for KaTeX
        return f'\n\n::: {{#{m[2]}}}\n$$\n{m[1].strip()} \\qquad({new(m[2]).split()[1]})\n$$\n:::\n\n'
    def section(m):
        new(m[2])
        return m[0]
    def markdown(s):
        s = re.sub(r'\$\$((?:(?!\$\$).)+?)\$\$[ \t]*\{#(eq-[\w-]+)\}', equation, s, flags=re.S)
        s = re.sub(r'!\[([^\]]*)\](\([^)]*\)\{#(fig-[\w-]+))', lambda m: f'![{new(m[3])}: {m[1]}]{m[2]}', s)
        s = re.sub(r'^: (.*?) (\{#(tbl-[\w-]+))', lambda m: f': {new(m[3])}: {m[1]} {m[2]}', s, flags=re.M)
        return re.sub(r'^(#+ .*?) \{#(sec-[\w-]+)', section, s, flags=re.M)
    for c in nb['cells']:
        source = ''.join(c['source'])
        if c['cell_type'] == 'markdown': c['source'] = markdown(source)
        elif c['cell_type'] == 'code':
            opts, code = cell_options(source)
            kind = str(opts.get('label', '')).split('-')[0]
            if kind not in KINDS: continue
            opts[f'{kind}-cap'] = f"{new(opts['label'])}: {opts.get(f'{kind}-cap', '')}"
            c['source'] = '\n'.join([f'#| {k}: {json.dumps(v)}' for k,v in opts.items()] + [code])
            for out in c['outputs'] if kind == 'tbl' else []:
                data = out.get('data', {})
                if 'text/markdown' in data: data['text/markdown'] = f"{''.join(data['text/markdown'])}\n\n: {opts['tbl-cap']}"
    return labels

def resolve(nb, labels, bib, problem):
    "Replace `@fig-x` and `[@key]` by links, append the references that were used, and call `problem` for each that does not exist"
    used = set()
    def cite(key, form='{name} ([{year}](#ref-{key}))'):
        if key not in bib:
            problem(f'@{key}')
            return key
        used.add(key)
        return form.format(name=short_authors(bib[key]), year=bib[key]['year'], key=key)
    def bracket(m):
        link = lambda k: cite(k[1], '[{year}](#ref-{key})' if k[0][0] == '-' else '[{name} {year}](#ref-{key})')
        return '(' + '; '.join(re.sub(r'-?@([\w:-]*\w)', link, part.strip()) for part in m[1].split(';')) + ')'
    def crossref(m):
        if m[1] not in labels:
            problem(f'@{m[1]}')
            return m[1]
        return f'[{labels[m[1]]}](#{m[1]})'
    def prose(s):
        s = re.sub(rf'(?<![\w`])@((?:{"|".join(KINDS)})-[\w-]*\w)', crossref, s)
        return NARRATIVE.sub(lambda m: cite(m[1]), BRACKETED.sub(bracket, s))
    edit_markdown(nb, lambda s: ''.join(p if i % 2 else prose(p) for i,p in enumerate(CODE.split(s))))
    if used:
        items = '\n\n'.join(f'::: {{#ref-{k} .csl-entry}}\n{full_entry(bib[k])}\n:::' for k in sorted(used))
        nb['cells'].append(dict(cell_type='markdown', metadata={}, id='references', source=f'## References {{.unnumbered}}\n\n{items}'))

def caption_html(text):
    "Markdown and maths of a caption, which smalldocs takes literally"
    parts = re.split(r'\$([^$]+)\$', text)
    return ''.join(html.escape(f'\\({p}\\)') if i % 2 else MarkdownIt().renderInline(p) for i,p in enumerate(parts))

def output_name(path, nb):
    "The path of a page without the number in its name, as its front matter says"
    m = re.search(r'^output-file:\s*(\S+)\.html', ''.join(nb['cells'][0]['source']), re.M)
    return path.with_name(f'{m[1]}.ipynb') if m else path

def flat_config(proc, names):
    "The site's configuration in one piece, with globs in the sidebar expanded and pages under their new names"
    config = yaml.safe_load((proc.parent/'_quarto.yml').read_text(encoding='utf-8'))
    web = config['website']
    web |= yaml.safe_load((proc/'nbdev.yml').read_text(encoding='utf-8'))['website']
    contents, new_name = [], lambda p: names.get(p, p).as_posix()
    for entry,paths in expand_sidebar(config, proc):
        if 'href' in entry: entry['href'] = new_name(Path(entry['href']))
        if 'contents' in entry: entry['contents'] = [n for n in map(new_name, paths) if n != entry.get('href')]
        contents.append(entry)
    web['sidebar']['contents'] = contents
    for key in ('bibliography', 'link-citations', 'execute'): del config[key]
    for key in ('html-math-method', 'grid', 'respect-user-color-scheme'): del config['format']['html'][key]
    del config['project']['render']
    return config

def render_small(proc, cfg, draft=False):
    "Render `_proc` with smalldocs; exits with a list of what does not resolve, or only prints it for a draft"
    import smalldocs.layout, smalldocs.notebook
    from smalldocs.site import build
    pages, bib, problems = read_pages(proc), read_bib(proc/'references.bib'), []
    names = {p: output_name(p, nb) for p,nb in pages.items()}
    moved, config = {p.name: n.name for p,n in names.items()}, flat_config(proc, names)
    (proc/'_quarto.yml').write_text(yaml.safe_dump(config, sort_keys=False), encoding='utf-8')
    for p,nb in pages.items():
        resolve(nb, number_labels(nb), bib, lambda what: problems.append(f'{p}: {what} is not defined'))
        edit_markdown(nb, lambda s: re.sub(r'\]\(([^):]*?)([\w-]+\.ipynb)', lambda m: f']({m[1]}{moved.get(m[2], m[2])}', s))
        (proc/p).unlink()
        write_page(proc/names[p], nb)
    figure = smalldocs.notebook.figure
    smalldocs.layout.KATEX = 'OUR-KATEX'
    smalldocs.notebook.figure = lambda img, opts, n: figure(img, opts, n).replace(
        html.escape(str(opts.get('fig-cap'))), caption_html(str(opts.get('fig-cap'))))
    site = build(proc, quiet=True)
    for f in (proc/'_docs').rglob('*.html'): edit_file(f, lambda s: s.replace('OUR-KATEX', os.path.relpath(proc/'_docs'/'katex', f.parent)))
    for f in (proc/'_docs').rglob('themes/*.css'): edit_file(f, lambda s: re.sub(r'@import url\([^)]*\);', '', s))  # web fonts
    problems += [w for w in map(str, site.warnings) if not re.search('output-file|scss', w)]
    if problems and not draft: sys.exit('\n'.join(problems))
    if problems: print(*problems, sep='\n')

def render_quarto(proc, cfg, draft=False): subprocess.run(['quarto', 'render', '--no-cache'], cwd=proc, check=True)


# ---------- the command

def build_site(cfg, draft=False):
    "Process, render, and put the finished site in place of the last one"
    proc = process(cfg)
    pages = describe(proc)
    (render_quarto if shutil.which('quarto') else render_small)(proc, cfg, draft)
    finish(proc/'_docs', pages, cfg)
    shutil.rmtree(cfg.doc_path, ignore_errors=True)
    shutil.move(proc/'_docs', cfg.doc_path)

def serve(cfg, port):
    "Serve the site and build it again, in a fresh process, whenever something it is made of changes"
    quiet = type('Quiet', (SimpleHTTPRequestHandler,), dict(log_message=lambda *_: None))
    server = ThreadingHTTPServer(('127.0.0.1', port), partial(quiet, directory=cfg.doc_path))
    Thread(target=server.serve_forever, daemon=True).start()
    print(f'Serving http://127.0.0.1:{server.server_port} (Ctrl-C stops it)', flush=True)
    kinds = ('.ipynb', '.py', '.css', '.js', '.bib', '.png')
    stamp = lambda: max(f.stat().st_mtime for d in (cfg.nbs_path, cfg.lib_path) for f in d.rglob('*') if f.suffix in kinds)
    last = stamp()
    while True:
        time.sleep(1)
        if (now := stamp()) != last:
            last = now
            print('Building again ...', flush=True)
            subprocess.run([sys.executable, __file__, '--draft'])

@call_parse
def main(
    preview:bool=False,  # Serve the site afterwards and rebuild it on every change
    port:int=4200,       # Port of the preview; 0 takes a free one
    draft:bool=False,    # Only print what does not resolve, and build all the same
):
    "Build the site in `_docs`"
    cfg = get_config()
    sys.path.insert(0, str(cfg.config_path))
    build_site(cfg, draft or preview)
    print(f'The site is in {cfg.doc_path.name}/: open {cfg.doc_path.name}/index.html')
    try:
        if preview: serve(cfg, port)
    except KeyboardInterrupt: pass
