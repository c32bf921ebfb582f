"""What people look at: tables on a terminal, Markdown for a pull request, CSV for a spreadsheet."""
