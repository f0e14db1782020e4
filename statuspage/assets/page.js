// Replaces the content of the page every two seconds while somebody looks at it.
'use strict';
setInterval(async () => {
  if (document.hidden || String(getSelection())) return;
  try {
    const answer = await fetch(location.href, { cache: 'no-store' });
    const page = new DOMParser().parseFromString(await answer.text(), 'text/html');
    for (const place of ['main', '#at']) document.querySelector(place).replaceWith(page.querySelector(place));
    document.body.classList.remove('stale');
  } catch {
    document.body.classList.add('stale'); // koldproxy does not answer: what is shown is old
  }
}, 2000);
