"""The report of a run: the right numbers, whatever is missing; a page that strangers' text can't take over, in a real browser."""
import json, os, re
from html.parser import HTMLParser

import pytest
from test_site import CHROMIUM, QUIET

from g2c_rl.report import write_report

HOSTILE = '</script><script>window.hacked = 1</script><img src=x onerror="window.hacked = 1">\'"&amp;<!-- \u2028\u2029\ud800\u202e\x00'
STEPS, K, GROUPS = 12, 4, 2

def lines(records): return ''.join(json.dumps(r) + '\n' for r in records)

def token(text, logp=None, new=.1):
    "A token of tokens.jsonl; without a log-prob it is prompt or padding"
    return dict(text=text, mask=int(logp is not None), logp=logp, new_logp=logp and logp + new, ref_logp=logp and logp - .5)

def make_run(folder, steps=STEPS, stranger='', long=''):
    "A run folder made by hand: its third step measured no KL, its groups 1 are degenerate, `stranger` stands wherever text can"
    folder.mkdir(parents=True, exist_ok=True)
    def exam(right, low, high):
        answers = [dict(prompt=f'2 + {i}? {stranger}', answer=2 + i, completion=f' {2+i} {stranger}', score=float(i < right)) for i in range(10)]
        return dict(pass_rate=right/10, interval=[low, high], n=10, answers=answers)
    write = lambda name, text: (folder/name).write_text(text)
    write('config.json', json.dumps(dict(
        config=dict(task='arithmetic', model='baselm' + stranger, steps=steps, k=K, groups_per_step=GROUPS, seed=0, lr=.003),
        versions=dict(g2c_rl='0.1', python='3.11' + stranger), device='cpu', trainable_parameters=10, parameters=1000)))
    write('evaluation.json', json.dumps(dict(before=exam(5, .237, .763), after=exam(9, .596, .982))))
    write('metrics.jsonl', lines(dict(step=s, reward_mean=s/steps, all_fail=1., all_pass=0., kl=None if s == 3 else .1*s, entropy=1/s,
                                      completion_length=3., truncated=0., loss=None if s == 3 else 0.) for s in range(1, steps + 1)))
    write('samples.jsonl', lines(
        dict(step=s, group=g, prompt=f'How much is {s} + {g}? {stranger}', completion=f' {s+g} x{i}{stranger}{long}', reward=float(g == 0 and i == 0),
             advantage=0. if g else [1.5, -.5, -.5, -.5][i], logp=-.6, tokens=3, truncated=i == 3)
        for s in range(1, steps + 1) for g in range(GROUPS) for i in range(K)))
    write('alarms.jsonl', lines([dict(step=5, alarm='KL jump' + stranger, value=1.5, advice='Lower the learning rate.' + stranger)]))
    row = [token(' 0'), token('?'), token(f'?{stranger}'[-3:]), token(' 1', -.1), token(f' x{stranger}', -.2, -.1), token('', -.3), token('')]
    write('tokens.jsonl', lines(dict(step=s, group=0, reward=[1., 0., 0., 0.], advantage=[1.5, -.5, -.5, -.5], rows=[row]*K) for s in (1, steps)))
    return folder

def data_of(page): return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])

def report(folder): return write_report(folder).read_text(encoding='utf-8')

class Elements(HTMLParser):
    "The elements and links of a page, as a parser that knows nothing of ours sees them"
    def __init__(self, page):
        self.names, self.links = [], []
        super().__init__()
        self.feed(page)
    def handle_starttag(self, name, attributes):
        self.names.append(name)
        self.links += [v for k,v in attributes if k in ('src', 'href')]

@pytest.fixture
def run(tmp_path): return make_run(tmp_path/'run')

def test_what_it_says(run):
    page = report(run)
    for said in ('arithmetic with GRPO', '12 of 12 steps', '50.0%', '90.0%', '23.7% to 76.3%', '59.6% to 98.2%', 'The tick at 50% is a policy that guesses',
                 '4 answers became right, 0 became wrong', 'Lower the learning rate.', '10 of 1,000 (1.00%)', '0.003', '0.08333 at step 1, 1 at step 12', '3.11'):
        assert said in page, said
    assert sorted(p.name for p in run.iterdir() if 'report' in p.name) == ['report.html']

def test_same_folder_same_page(run, tmp_path):
    assert report(run) == report(run) == report(make_run(tmp_path/'elsewhere'))

@pytest.mark.parametrize('name,said', [
    ('alarms.jsonl', 'No alarm is on record'), ('tokens.jsonl', 'No tokens are on record'), ('samples.jsonl', 'No completion is on record'),
    ('metrics.jsonl', 'No step has been recorded'), ('evaluation.json', 'There is no exam on record')])
def test_a_missing_file_is_said(run, name, said):
    assert said not in report(run)
    (run/name).unlink()
    assert said in report(run)
    (run/name).write_text('')
    assert said in report(run)

def test_only_a_config(run):
    for p in run.iterdir():
        if p.name != 'config.json': p.unlink()
    assert '0 of 12 steps' in report(run)
    (run/'config.json').unlink()
    with pytest.raises(FileNotFoundError, match='holds no run'): write_report(run)

def test_stopped_before_the_final_exam(run):
    exam = json.loads((run/'evaluation.json').read_text())
    (run/'evaluation.json').write_text(json.dumps(dict(before=exam['before'])))
    (run/'metrics.jsonl').write_text((run/'metrics.jsonl').read_text().splitlines()[0] + '\n')
    page = report(run)
    assert 'stopped before its final exam' in page and '1 of 12 steps' in page and '90.0%' not in page

def test_no_chance_level_where_there_is_none(run):
    config = json.loads((run/'config.json').read_text())
    for task in ('addition', 'a task of my own'):
        config['config']['task'] = task
        (run/'config.json').write_text(json.dumps(config))
        assert 'guesses' not in report(run) and 'class="chance"' not in report(run)

def test_torn_and_damaged_lines(run):
    whole = data_of(report(run))
    for name in ('metrics', 'samples', 'alarms', 'tokens'):
        with open(run/f'{name}.jsonl', 'a') as f: f.write('{"step": 1')
    page = report(run)
    assert data_of(page) == whole
    assert all(f'1 unreadable in {name}.jsonl' in page for name in ('metrics', 'samples', 'alarms', 'tokens'))
    (run/'evaluation.json').write_text('[[[[' * 100_000)
    assert '1 unreadable in evaluation.json' in report(run)

def test_gaps_stay_gaps(run):
    page = report(run)
    kl = data_of(page)['curves']['values']['kl']
    assert kl[2] is None and kl[1] == pytest.approx(.2)
    figure = re.search(r'<figure data-curve="kl">.*?</figure>', page)[0]
    assert [d.count('M') for d in re.findall(r'd="([^"]*)" class="(?:raw|mean)"', figure)] == [2, 2]
    assert '1 of 12 points not measured' in figure
    everything_fell = data_of(page)['curves']['values']['degenerate']
    assert everything_fell == [.5]*STEPS

def test_nothing_but_nan(run):
    (run/'metrics.jsonl').write_text('{"step": 1, "reward_mean": NaN, "kl": Infinity, "entropy": null}\n')
    values = data_of(report(run))['curves']['values']
    assert values['reward_mean'] == values['kl'] == values['entropy'] == [None]

def test_long_runs_are_thinned_and_sampled(tmp_path):
    page = report(make_run(tmp_path, steps=1000))
    data = data_of(page)
    assert len(data['curves']['steps']) <= 400 and data['curves']['steps'][-1] == 1000
    assert 'Each point is the mean of 3 steps' in page
    rows = [r for g in data['samples'] for r in g['rows']]
    steps = [g['step'] for g in data['samples']]
    assert len(rows) <= 400 and {1, 1000} <= set(steps) and f'{len(rows)} of 8,000 completions are on this page' in page
    assert all(len(g['rows']) == K for g in data['samples']), 'groups stay whole'

def test_size(tmp_path):
    page = report(make_run(tmp_path, steps=120, stranger=HOSTILE, long='\U0001f600'*5000))
    assert len(page.encode()) < 1_500_000 and 'more characters)' in page

def test_tokens(run):
    page = report(run)
    assert 'All 8 completions fit' in page
    shown = data_of(page)['tokens'][0]['rows'][0]
    assert [t[1] for t in shown['tokens']] == [0, 0, 0, 1, 1, 1, 0]
    text, scored, logp, ratio, kl = shown['tokens'][4]
    assert (logp, ratio) == (pytest.approx(-.2), pytest.approx(.904837, abs=1e-4)) and kl == pytest.approx(.106531, abs=1e-4)
    assert shown['tokens'][0][2:] == shown['tokens'][-1][2:] == [None]*3

@pytest.mark.parametrize('shift,doubts', [(0, 0), (-1, 2), (1, 2)])
def test_an_off_by_one_is_noticed(run, shift, doubts):
    samples = [dict(step=1, group=0, prompt='How much is 1 + 0?', completion=' 17', reward=1., advantage=0., logp=-.6, tokens=3, truncated=False)]
    (run/'samples.jsonl').write_text(lines(samples))
    texts = [' +', ' 0', '?', ' 1', '7', '', '', '']
    row = [token(t, [-.1, -.2, -.3][i-3-shift] if 3 <= i - shift < 6 else None) for i,t in enumerate(texts)]
    (run/'tokens.jsonl').write_text(lines([dict(step=1, group=0, reward=[1.], advantage=[0.], rows=[row])]))
    page = report(run)
    assert len(data_of(page)['tokens'][0]['rows'][0]['doubts']) == doubts
    assert ('do not fit' in page) == bool(doubts)

def test_text_from_strangers(tmp_path):
    page, harmless = (report(make_run(tmp_path/name, stranger=text)) for name,text in (('a', HOSTILE), ('b', 'friendly')))
    hostile, friendly = Elements(page), Elements(harmless)
    assert hostile.names == friendly.names and 'img' not in hostile.names
    assert all(l.startswith(('#', 'data:')) for l in hostile.links)
    data = page.split('id="data">')[1].split('</script>')[0]
    assert not set('<>&\u2028\u2029\u202e\x00') & set(data)
    assert data_of(page)['samples'][0]['rows'][0][0] == f' 1 x0{HOSTILE}', 'escaped, not changed'

# ---------- in a browser

browser_test = pytest.mark.skipif(not CHROMIUM and 'CI' not in os.environ, reason='no Chromium found (under CI that is a failure)')

# Elements whose text has less contrast with what is painted beneath it than WCAG AA asks; the canvas does the colour arithmetic
FAINT = r"""() => {
  const canvas = Object.assign(document.createElement('canvas'), {width: 1, height: 1}), pen = canvas.getContext('2d', {willReadFrequently: true})
  const paint = color => { pen.fillStyle = color; pen.fillRect(0, 0, 1, 1); return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3) }
  const light = rgb => rgb.map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4).reduce((s, v, i) => s + v * [.2126, .7152, .0722][i], 0)
  const faint = []
  for (const e of document.querySelectorAll('body *')) {
    if (e.matches('script, noscript') || ![...e.childNodes].some(n => n.nodeType == 3 && n.data.trim())) continue
    const above = []
    for (let p = e; p; p = p.parentElement) above.unshift(p)
    let ground
    for (const p of above) ground = paint(getComputedStyle(p).backgroundColor)
    const style = getComputedStyle(e), text = paint(e.matches('svg *') ? style.fill : style.color)
    const [low, high] = [light(ground), light(text)].sort((a, b) => a - b), contrast = (high + .05) / (low + .05)
    if (contrast < 4.5) faint.push(`${e.tagName} ${e.className} ${e.textContent.slice(0, 20)}: ${contrast.toFixed(2)}`)
  }
  return faint
}"""

@pytest.fixture(scope='module')
def chromium():
    from playwright.sync_api import sync_playwright
    assert CHROMIUM, 'CI has to run the browser tests: install Chromium'
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=QUIET.split())
        yield browser
        browser.close()

@pytest.fixture
def visit(chromium, tmp_path):
    "Open the report of a run; at the end there must have been no error and no request but for the page"
    contexts, wrong = [], []
    def open_page(folder, width=1280, scheme='light'):
        context = chromium.new_context(viewport=dict(width=width, height=844), color_scheme=scheme)
        contexts.append(context)
        page, address = context.new_page(), write_report(folder).as_uri()
        page.on('request', lambda r: r.url.startswith((address, 'data:')) or wrong.append(r.url))
        page.on('console', lambda m: m.type in ('error', 'warning') and wrong.append(m.text))
        page.on('pageerror', lambda e: wrong.append(str(e)))
        page.goto(address)
        return page
    yield open_page
    for c in contexts: c.close()
    assert not wrong

@browser_test
@pytest.mark.parametrize('scheme', ['light', 'dark'])
@pytest.mark.parametrize('width', [1280, 390])
def test_hostile_text_in_a_browser(visit, tmp_path, scheme, width):
    page = visit(make_run(tmp_path/'run', stranger=HOSTILE, long='x'*300), width, scheme)
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.evaluate('window.hacked') is None
    assert page.locator('img').count() == 0
    assert HOSTILE[:60] in page.locator('#sample-rows').text_content()
    assert page.evaluate('document.documentElement.scrollWidth') <= width
    assert page.evaluate(FAINT) == []
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r'\d+', ground))) > 384) == (scheme == 'light')

@browser_test
def test_the_policy_stops_what_escaping_would_let_through(visit, run, chromium):
    page = write_report(run).read_text().replace('<main>', '<main><script>window.hacked = 1</script><p onclick="window.hacked = 1" id="bad">x</p>')
    (run/'report.html').write_text(page)
    tab = chromium.new_page()
    tab.goto((run/'report.html').as_uri())
    tab.click('#bad')
    assert tab.evaluate('window.hacked') is None and tab.locator('#sample-rows tr').count() > 1
    tab.close()

@browser_test
def test_filters(visit, run):
    page = visit(run)
    count = lambda: page.locator('#count').text_content()
    total = STEPS*GROUPS*K
    assert count() == f'{total} matching, {6*K} shown'
    page.click('#more')
    assert count() == f'{total} matching, {12*K} shown'
    page.locator('#f-step').select_option('5')
    assert count() == f'{GROUPS*K} matching' and not page.locator('#more').is_visible()
    page.get_by_label('Groups', exact=True).select_option('degenerate')
    assert count() == f'{K} matching' and 'group 1, degenerate' in page.locator('#sample-rows').text_content()
    page.get_by_label('Groups', exact=True).select_option('informative')
    page.get_by_label('Reward', exact=True).select_option('1 or more')
    assert count() == '1 matching'
    page.get_by_label('Reward', exact=True).select_option('between')
    assert count() == 'No completion matches.'
    page.get_by_label('Reward', exact=True).select_option('any')
    page.get_by_label('Text', exact=True).fill('x3')
    assert page.locator('#sample-rows td code').all_text_contents() == [' 5 x3'] and page.locator('.cut').count() == 1

@browser_test
def test_slider_by_keyboard(visit, run):
    page = visit(run)
    now = lambda name: page.locator(f'[data-curve={name}] .now').text_content()
    assert page.locator('#at').text_content() == '12' and now('reward_mean') == '1'
    page.keyboard.press('Tab')
    while page.evaluate('document.activeElement.id') != 'step': page.keyboard.press('Tab')
    for _ in range(9): page.keyboard.press('ArrowLeft')
    assert page.locator('#at').text_content() == '3'
    assert (now('reward_mean'), now('kl')) == ('0.25', 'not measured')
    assert page.evaluate("getComputedStyle(document.querySelector('[data-curve=kl] .cursor')).display") == 'inline'
    page.locator('[data-curve=kl] svg').hover(position=dict(x=2, y=40))
    assert page.locator('#at').text_content() == '1'

@browser_test
def test_tokens_in_a_browser(visit, run):
    page = visit(run)
    rows = page.locator('#token-rows table').first.locator('tr')
    cells = lambda i: rows.nth(i).locator('td').all_text_contents()
    assert cells(0) == ['·0', '?', '?', '·1', '·x', '∅', '∅']
    assert cells(1) == ['prompt']*3 + ['yes']*3 + ['padding']
    assert cells(2) == ['']*3 + ['−0.10', '−0.20', '−0.30'] + ['']
    assert cells(3) == ['']*3 + ['1.50']*3 + ['']
    assert cells(4)[3:6] == ['1.11', '0.90', '1.11']
    assert page.locator('#token-rows table').first.locator('.up').count() == 2
    page.locator('#which').select_option('1')
    assert page.locator('#token-rows table').count() == K

@browser_test
@pytest.mark.parametrize('missing', ['metrics.jsonl', 'samples.jsonl', 'tokens.jsonl', 'evaluation.json'])
def test_no_error_when_something_is_missing(visit, run, missing):
    (run/missing).unlink()
    assert visit(run, 390).locator('h2').count() == 6
