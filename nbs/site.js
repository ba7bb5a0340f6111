// What the pages need beyond HTML and CSS, for both builders: everything that scrolls can be scrolled by keyboard, Escape closes
// what a button has opened, and the state of each such button is said aloud.
(() => {
  const scrollers = 'pre, .katex-display, .table-scroll, .cell-output-display, #TOC, #quarto-sidebar'
  const reachable = () => document.querySelectorAll(scrollers).forEach(e => {
    const scrolls = e.scrollWidth > e.clientWidth + 1 || e.scrollHeight > e.clientHeight + 1 && getComputedStyle(e).overflowY != 'visible'
    if (scrolls) e.tabIndex = 0
    else if (e.tabIndex == 0) e.removeAttribute('tabindex')
  })
  addEventListener('load', reachable)
  addEventListener('resize', reachable)

  // what opens and closes something is a button, whatever element it was made of
  document.querySelectorAll('a[data-bs-toggle=collapse], .callout-header[data-bs-toggle=collapse]').forEach(a => {
    a.setAttribute('role', 'button')
    a.tabIndex = 0
    a.addEventListener('keydown', e => { if (e.key == 'Enter' || e.key == ' ') { e.preventDefault(); a.click() } })
  })
  const names = {'nav.navbar': 'Site', '#quarto-sidebar': 'Chapters', '.quarto-secondary-nav': 'Where you are',
                 '.page-navigation': 'Previous and next', '#TOC': 'On this page'}
  for (const [which, name] of Object.entries(names)) document.querySelectorAll(which).forEach(n => n.setAttribute('aria-label', name))

  const sidebar = document.querySelector('#quarto-sidebar')
  const toggles = document.querySelectorAll('.quarto-btn-toggle')
  const said = () => toggles.forEach(b => b.setAttribute('aria-expanded', sidebar.classList.contains('show')))
  if (sidebar && toggles.length) {
    new MutationObserver(said).observe(sidebar, {attributes: true, attributeFilter: ['class']})
    addEventListener('keydown', e => {
      if (e.key == 'Escape' && sidebar.classList.contains('show')) { toggles[0].click(); toggles[0].focus() }
    })
    said()
  }
})()
