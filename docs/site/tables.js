/* Scrollable boxes can be reached with the keyboard. */
document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code").forEach(box => {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  });
});
