/* Commands wrap between words, never after the dashes of an option; boxes that scroll can be reached with the keyboard. */
document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll(".md-typeset .language-bash code").forEach(code => {
    const walker = document.createTreeWalker(code, NodeFilter.SHOW_TEXT), texts = [];
    while (walker.nextNode()) if (walker.currentNode.textContent.includes("-")) texts.push(walker.currentNode);
    texts.forEach(text => {
      const parts = text.textContent.split(/(\s+)/).map(part => {
        if (!part.includes("-")) return part;
        const word = document.createElement("span");
        word.className = "word";
        word.textContent = part;
        return word;
      });
      text.replaceWith(...parts);
    });
  });
  document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code").forEach(box => {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  });
});
